"""What is done when the device has no room for one block and one micro-batch: smaller pieces.

The operation is run again, uncompiled, for halves of the micro-batch's rows (the loss: of a chunk's
tokens), and for halves of these, down to a single one.  If that is not enough, saved activations
are given up, to be computed again in backward.  Results differ by the order of summation only, and
no other operation is run again.

Price: none, until it has happened once (see `Recovery.seen`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.state import LayerInputs, StepState
from megatrain.errors import NoRoomError
from megatrain.models import BlockModel
from megatrain.models.passes import Gradients, Run, Tensors, Written, backward, forward
from megatrain.models.row_share import RowShare, has_rows_in_front

T = TypeVar("T")


class DeviceMemoryError(NoRoomError):
    """The device has no room for an operation, nor for its smallest pieces."""

    @classmethod
    def of(cls, what: str, found: str) -> "DeviceMemoryError":
        """Of what was to be run and what the allocator says, in words."""
        return cls(
            asked=what,
            found=f"no room for it on the device: {found.rstrip('.')}",
            change="stop what else takes GPU memory (see nvidia-smi), use fewer rows at a time or"
            " shorter ones, or set gpu_memory to what is left",
        )


class Recovery:
    """Runs what has found no room in smaller pieces.

    Args:
        allowed: False lets every failure out.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        self._allowed = allowed
        self.notice: str | None = None
        """What a user should hear, once."""

    @property
    def seen(self) -> bool:
        """Whether there has been no room before.

        From then on the micro-batches that are in a block's sums of gradients can be computed
        again until the block is done: what that takes is kept.  A compiled program adds to sums as
        soon as it can and then allocates more, so that one that fails may have spoilt them.
        """
        return self.notice is not None

    def or_again(self, what: str, first: Callable[[], T], again: Callable[[], T] | None) -> T:
        """What `first` gives, or `again` if there was no room for it.

        Args:
            what: block and micro-batch in words.
            first: as ever.
            again: in pieces; None: that would not be the same.
        """
        try:
            return first()
        except torch.OutOfMemoryError:
            if again is None or not self._allowed:
                raise
        # Only here: the error's traceback has held tensors.
        self._say(what)
        return again()

    def in_pieces(
        self,
        whole: range,
        run: Callable[[range], T],
        state: StepState,
        *,
        what: str,
        parted: bool = False,
    ) -> list[T]:
        """Results of consecutive pieces of `whole`, each as large as there is room for.

        Args:
            whole: rows or tokens.
            run: computes a piece; one that fails has changed nothing.
            state: whose saved activations are given up before this fails.
            what: block and micro-batch in words.
            parted: there was no room for the whole already.

        Raises:
            torch.OutOfMemoryError: if there is no room for one alone.
        """
        waiting, done = _halves(whole) if parted else [whole], list[T]()
        while waiting:
            piece = waiting.pop(0)
            try:
                done.append(run(piece))
                continue
            except torch.OutOfMemoryError as error:
                if not self._allowed:
                    raise
                found = str(error)  # no more: its traceback holds tensors
            if len(piece) > 1:
                waiting[:0] = _halves(piece)
            elif state.give_up_saved():
                waiting.insert(0, piece)
            else:
                raise torch.OutOfMemoryError(found)
            self._say(what)
        return done

    def _say(self, what: str) -> None:
        self.notice = self.notice or (
            f"no room on the device for {what}: it was run again in smaller pieces, with the same"
            " result to rounding. Steps are slower as long as room is short: something else may"
            " take GPU memory (see nvidia-smi). This is said once"
        )


def _halves(whole: range) -> list[range]:
    """Two halves of more than one, else itself."""
    middle = len(whole) // 2
    return [whole[:middle], whole[middle:]] if middle else [whole]


@dataclass(frozen=True, kw_only=True)
class PiecewiseBlock:
    """One block and one micro-batch, uncompiled and in pieces."""

    recovery: Recovery
    model: BlockModel
    run: Run
    tensors: Tensors
    layer: int | None
    """Position in the container; None: embed."""
    batch: MicroBatch
    inputs: LayerInputs
    random: Callable[[], AbstractContextManager[None]]
    """Entered anew for each attempt."""
    what: str
    """In words."""

    def forward(self, state: StepState) -> Written:
        """As `megatrain.models.passes.forward`."""

        def of_rows(rows: range) -> Written:
            x_BTD, call, carried, _ = self._share(rows)[1]
            with self.random():
                y_BTD, written = forward(self.run, self.tensors, x_BTD, call, carried)
            if rows != self._rows and not self._cuttable(len(rows), [y_BTD, *written.values()]):
                raise torch.OutOfMemoryError(f"{self.what} gives tensors that are no rows")
            return y_BTD, written

        parts = self._in_pieces(of_rows, state)
        if len(parts) == 1:
            return parts[0]
        outputs, written = zip(*parts, strict=True)
        return torch.cat(outputs), {
            key: torch.cat([each[key] for each in written]) for key in written[0]
        }

    def backward(self, state: StepState, sums: Tensors) -> Gradients:
        """As `megatrain.models.passes.backward`."""
        inputs, shares = self.inputs, list[RowShare]()

        def of_rows(rows: range) -> Gradients:
            share, (x_BTD, call, carried, outgoing) = self._share(rows)
            with self.random():
                found = backward(
                    self.run,
                    self.tensors,
                    x_BTD,
                    call,
                    carried,
                    inputs.differentiable,
                    outgoing,
                    sums,
                    inputs.passes_on,
                )
            shares.extend([share] if share else [])
            return found

        parts = self._in_pieces(of_rows, state)
        if len(parts) == 1:
            return parts[0]
        keys = sorted({key for _, read in parts for key in read})
        return joined(shares, inputs.x_BTD, "", [gradient for gradient, _ in parts]), {
            key: joined(shares, inputs.carried[key], key, [read.get(key) for _, read in parts])
            for key in keys
        }

    def _in_pieces(self, of_rows: Callable[[range], T], state: StepState) -> list[T]:
        return self.recovery.in_pieces(self._rows, of_rows, state, what=self.what, parted=True)

    @property
    def _rows(self) -> range:
        """All rows; a single piece, if some tensor cannot be cut."""
        num_rows, inputs = len(self.batch.ids_BT), self.inputs
        named = [("", inputs.x_BTD), *inputs.carried.items(), *inputs.outgoing.items()]
        given = [tensor for key, tensor in named if not RowShare.knows(key)]
        return range(num_rows if self._cuttable(num_rows, given) else 1)

    def _cuttable(self, num_rows: int, tensors: Sequence[Tensor]) -> bool:
        length = self.batch.ids_BT.shape[1]
        return all(has_rows_in_front(each, num_rows, length) for each in tensors)

    def _share(
        self, rows: range
    ) -> tuple[RowShare | None, tuple[Tensor, object, Tensors, dict[str, Tensor]]]:
        """What some rows are computed from; no `RowShare` for all of them."""
        inputs, ids_BT, positions_BT = self.inputs, self.batch.ids_BT, self.batch.positions_BT
        if rows == self._rows:
            x_BTD = inputs.x_BTD.to(ids_BT.device)
            return None, (x_BTD, inputs.call, inputs.carried, inputs.outgoing)
        share = RowShare.of_batch(self.model, ids_BT, positions_BT, rows)
        call = share.calls[self.layer] if self.layer is not None else share.positions_BT
        x_BTD = share.cut(inputs.x_BTD).to(ids_BT.device)
        return share, (x_BTD, call, share.local(inputs.carried), share.local(inputs.outgoing))


def joined(
    shares: Sequence[RowShare], whole: Tensor, key: str, parts: Sequence[Tensor | None]
) -> Tensor | None:
    """The gradient of a whole tensor, from those of its shares; None where none was reached."""
    reached = next((part for part in parts if part is not None), None)
    if reached is None:
        return None
    known = [
        reached.new_zeros(share.cut(whole, key).shape) if part is None else part
        for share, part in zip(shares, parts, strict=True)
    ]
    dim = shares[0].dimension(whole, key)
    return torch.stack(known).sum(0) if dim is None else torch.cat(known, dim)
