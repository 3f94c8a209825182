"""Some rows of a micro-batch: a layer's arguments, and its tensors cut by rows.

The arguments are recorded anew for those rows, so that masks and positions are the model's own;
parameters, which no argument depends on, are stood in for by zeros of no size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.models.blocks import BlockModel
from megatrain.models.build import COMPUTE_DTYPES
from megatrain.models.recorder import LayerCall

PROLOGUE = "prologue/"
"""Keys of carried tensors that the prologue writes; see `models/carried.py`."""


def has_rows_in_front(tensor: Tensor, num_rows: int, length: int) -> bool:
    """Whether a tensor is rows, or tokens row by row, as what layers give nearly always is."""
    return tensor.ndim > 0 and len(tensor) in (num_rows, num_rows * length)


@dataclass(frozen=True, kw_only=True)
class RowShare:
    """Rows `rows` of the `of` rows of a micro-batch."""

    rows: range
    of: int
    positions_BT: Tensor | None
    """For these rows."""
    calls: Sequence[LayerCall]
    """Of every layer, for these rows."""
    prologue: dict[str, Tensor]
    """Carried tensors of the prologue for these rows, of which only the shape means anything."""

    @classmethod
    def of_batch(
        cls, model: BlockModel, ids_BT: Tensor, positions_BT: Tensor | None, rows: range
    ) -> "RowShare":
        """Some rows of a micro-batch; see `BlockModel.prologue`."""
        cut = slice(rows.start, rows.stop)
        positions_BT = None if positions_BT is None else positions_BT[cut]
        zeros = {
            placed.name: torch.zeros(
                (), dtype=COMPUTE_DTYPES[segment.dtype], device=ids_BT.device
            ).expand(placed.shape)
            for segment in model.embed.layout.segments
            for placed in segment.params
        }
        with torch.no_grad():
            _, calls, prologue = model.prologue(zeros, ids_BT[cut], positions_BT)
        return cls(
            rows=rows, of=len(ids_BT), positions_BT=positions_BT, calls=calls, prologue=prologue
        )

    @staticmethod
    def knows(key: str) -> bool:
        """Whether the rows of the carried tensor under this key are found by its shape."""
        return key.startswith(PROLOGUE)

    def cut(self, tensor: Tensor, key: str = "") -> Tensor:
        """The share of a tensor of all rows; itself, if all rows share it.

        Args:
            tensor: of the whole micro-batch.
            key: of the carried tensor that it is, or of whose gradient it is.
        """
        dim = self.dimension(tensor, key)
        if dim is None:
            return tensor
        per_row = tensor.shape[dim] // self.of
        return tensor.narrow(dim, self.rows.start * per_row, len(self.rows) * per_row)

    def dimension(self, tensor: Tensor, key: str) -> int | None:
        """The dimension of a whole tensor in which rows follow each other."""
        if not self.knows(key):
            return 0
        mine = self.prologue[key].shape
        return next((d for d, n in enumerate(tensor.shape) if n != mine[d]), None)

    def local(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The share of each."""
        return {key: self.cut(tensor, key) for key, tensor in tensors.items()}
