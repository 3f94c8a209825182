"""Which tensors stand in which file of a model directory or checkpoint, and in what order.

A weight is stored once: in the model's own files, under the names that checkpoints of its kind
have.  What completes it for training (the residual that makes it an fp32 master, and the moments)
is in one file a block, under the parameter's name in the model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import torch
from torch import Tensor

from megatrain.checkpoint.tensors import FilePlan, Shards, TensorSpec, bytes_of, index_of
from megatrain.layout import BlockLayout, Purpose, Segment
from megatrain.memory import BlockStore
from megatrain.memory.store import DTYPES
from megatrain.models import BlockModel
from megatrain.models.weights import (
    Conversions,
    checkpoint_conversions,
    checkpoint_tensors,
    persistent_buffers,
)

STATE_FOLDER = "training_state"
STATE_PURPOSES = (Purpose.EXP_AVG, Purpose.EXP_AVG_SQ, Purpose.RESIDUAL)
"""fp32 first, then int16: so each tensor is aligned."""

Piece = tuple[str, Tensor]
"""A file's path in the directory, and the next bytes of it (flat uint8)."""
Read = Callable[[int], dict[str, Tensor]]
"""A block's weights by the parameters' full names, where they are; blocks are of whole layers."""


def state_file(block: int) -> str:
    """Where a block's residuals and moments are."""
    return str(PurePosixPath(STATE_FOLDER) / f"block-{block:05d}.safetensors")


def state_name(purpose: Purpose, name: str) -> str:
    """A state tensor's name in its file."""
    return f"{purpose.value}.{name}"


def saved_dtype(model: BlockModel, segment: Segment, asked: torch.dtype | None) -> torch.dtype:
    """dtype of a segment's weights in the file: what is asked for, or the compute dtype.

    What a bfloat16 model computes in fp32 (a router, say) is not rounded, as in transformers.
    """
    computed = DTYPES[segment.dtype]
    kept = model.compute_dtype == "bfloat16" and computed is torch.float32
    return computed if asked is None or kept else asked


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The tensor files of a directory.

    `pieces` gives their bytes block by block; nothing is read before its block's turn.
    """

    model: BlockModel
    order: tuple[int, ...]
    """Every block, of whole layers, as they are written."""
    model_files: dict[str, FilePlan]
    state_files: dict[str, FilePlan]

    @classmethod
    def planned(
        cls,
        model: BlockModel,
        *,
        max_shard_bytes: int,
        dtype: torch.dtype | None = None,
        order: Sequence[int] | None = None,
        with_state: bool = False,
    ) -> "Contents":
        """Count files and bytes.

        Args:
            model: its blocks; their parameters may be on meta.
            max_shard_bytes: size limit of a file of weights.
            dtype: of the weights; None leaves each in its compute dtype.
            order: of the blocks of whole layers; first to last by default.
            with_state: residuals and moments too.
        """
        conversions = checkpoint_conversions(model)
        chosen = tuple(range(len(model.whole.blocks)) if order is None else order)
        shards = Shards(max_bytes=max_shard_bytes)
        for block in chosen:
            layout = model.whole.blocks[block].layout
            on_meta = {
                param.name: torch.empty(
                    param.shape, dtype=saved_dtype(model, segment, dtype), device="meta"
                )
                for segment in layout.segments
                for param in segment.params
            }
            for name, tensor in checkpoint_tensors(model, on_meta, conversions).items():
                shards.add(TensorSpec.of(name, tensor))
        for name, buffer in persistent_buffers(model).items():
            shards.add(TensorSpec.of(name, buffer))
        states = {state_file(b): _state_plan(model.whole.blocks[b].layout) for b in chosen}
        return cls(
            model=model,
            order=chosen,
            model_files=shards.plans(),
            state_files={p: f for p, f in states.items() if f.tensors and with_state},
        )

    @property
    def files(self) -> dict[str, FilePlan]:
        return self.model_files | self.state_files

    @property
    def nbytes(self) -> int:
        """Of the tensor files; those beside them are small."""
        return sum(plan.nbytes for plan in self.files.values())

    @property
    def index(self) -> bytes | None:
        """The text of the index, if there are several files of weights."""
        return index_of(self.model_files) if len(self.model_files) > 1 else None

    def pieces(self, weights: Read, store: BlockStore | None = None) -> Iterator[tuple[int, Piece]]:
        """(block, piece) in the order of writing; the buffers follow under block -1.

        Call it between two steps, and take the pieces in any thread: the model itself is looked at
        now, and not while a step runs.

        Args:
            weights: of a block, in the dtypes that were planned.
            store: where residuals and moments are, if they were planned.
        """
        conversions = checkpoint_conversions(self.model)
        buffers = {name: each.cpu() for name, each in persistent_buffers(self.model).items()}
        return self._pieces(weights, store, buffers, conversions)

    def _pieces(
        self,
        weights: Read,
        store: BlockStore | None,
        buffers: dict[str, Tensor],
        conversions: Conversions,
    ) -> Iterator[tuple[int, Piece]]:
        planned = {path: iter(plan.tensors) for path, plan in self.files.items()}
        place = {s.name: path for path, plan in self.model_files.items() for s in plan.tensors}

        def checked(path: str, name: str, tensor: Tensor) -> Piece:
            assert next(planned[path]) == TensorSpec.of(name, tensor), "not as it was planned"
            return path, bytes_of(tensor)

        for block in self.order:
            tensors = weights(block)
            if conversions:  # what they make must not take room on a GPU
                tensors = {name: each.cpu() for name, each in tensors.items()}
            tensors = checkpoint_tensors(self.model, tensors, conversions)
            for name in list(tensors):
                yield block, checked(place[name], name, tensors.pop(name))
            if store is not None and state_file(block) in self.state_files:
                path = state_file(block)
                for name, parts in _state_tensors(store, self.model, block):
                    spec = TensorSpec(name=name, dtype=parts[0].dtype, shape=shape_of(parts))
                    assert next(planned[path]) == spec, "not as it was planned"
                    yield from ((block, (path, bytes_of(part))) for part in parts)
        for name, buffer in buffers.items():
            yield -1, checked(place[name], name, buffer)
        assert not any(list(rest) for rest in planned.values()), "not all that was planned"


def shape_of(parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Of one tensor, or of several with the rows of one."""
    if len(parts) == 1:
        return tuple(parts[0].shape)
    return (sum(len(part) for part in parts), *parts[0].shape[1:])


def _state_plan(layout: BlockLayout) -> FilePlan:
    specs = []
    for purpose in STATE_PURPOSES:
        for region in layout.regions(purpose):
            specs += [
                TensorSpec(
                    name=state_name(purpose, param.name),
                    dtype=DTYPES[region.dtype],
                    shape=param.shape,
                )
                for param in layout.segments[region.segment].params
            ]
    return FilePlan(tensors=tuple(specs))


def _state_tensors(
    store: BlockStore, model: BlockModel, whole: int
) -> Iterable[tuple[str, Sequence[Tensor]]]:
    """By name in the file, each in the parts that it lives in, in the order of their rows."""
    for purpose in STATE_PURPOSES:
        parts: dict[str, list[Tensor]] = {}
        for block in model.blocks_of(whole):
            for name, tensor in store.tensors(block, purpose).items():
                parts.setdefault(name, []).append(tensor)
        for param in model.whole.blocks[whole].layout.params:
            if param.name in parts:
                yield state_name(purpose, param.name), parts[param.name]
