"""Everything that belongs to one running step, and what an update needs of the step before."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatrain.engine.microbatch import MicroBatch
from megatrain.models import CarriedTensors, LayerCall
from megatrain.models.passes import Leaves, Written

Saved = tuple[Leaves, Written | None]
"""What a block computed from and what it computed, with the graph between them; None: given up, as
the device has no room for it."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What one block and one micro-batch are computed from."""

    x_BTD: Tensor
    """On the host, if it was spilled and its slot is in use again."""
    call: LayerCall | Tensor | None
    """Of embed: positions of packed rows."""
    carried: dict[str, Tensor]
    differentiable: tuple[str, ...] = ()
    """Keys of `carried` whose gradient is wanted."""
    outgoing: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the output, under "", and of carried tensors; for backward."""
    passes_on: bool = False
    """Whether the gradient of the input is wanted."""


@dataclass(frozen=True, kw_only=True)
class PendingUpdate:
    """What an update needs beside the gradient: fixed by the step that made the gradient."""

    learning_rate: float
    gradient_scale: float
    left_out: frozenset[int] = frozenset()
    """Blocks whose gradient was not finite."""


@dataclass(kw_only=True)
class StepState:
    """Everything that belongs to one running step."""

    step: int
    micro_batches: Sequence[MicroBatch]
    total_weight: float
    """Sum of loss weights over the step's rows: the loss divides by it."""
    training: bool
    update: PendingUpdate | None = None
    """Of blocks that are updated as soon as their gradient is there."""
    pending: PendingUpdate | None = None
    """Of blocks whose update was deferred by the step before."""
    before_update: Callable[[int], None] | None = None
    """Called with a block that is about to be overwritten; returns when it may be."""
    targets: Sequence[tuple[Tensor, Tensor]] = ()
    """Per micro-batch, if it is asked for these instead of the loss: flat positions, and the tokens
    whose log-probability is wanted behind them."""
    answers: dict[int, Tensor] = field(default_factory=dict)
    """micro-batch -> (2, N), see `megatrain.engine.queries.answer`."""
    lengths: Sequence[Tensor] = ()
    """Per micro-batch, if routers are watched: tokens of its rows."""
    routed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(block, micro-batch) -> what its router did, see `megatrain.models.routing`."""
    home_routed: Tensor | None = None
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)
    boundaries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(block, micro-batch) -> the block's input."""
    spilled: dict[tuple[int, int], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """(block, micro-batch) -> form of an input that is on the host."""
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    """(block, micro-batch) -> its forward, ready to be run backward."""
    kept: dict[int, LayerInputs] = field(default_factory=dict)
    """Micro-batches that are in the sums of the block in backward, should these be needed again."""
    streams: dict[int, Tensor] = field(default_factory=dict)
    """micro-batch -> gradient of the output of the block that is next in backward."""
    carried: dict[int, CarriedTensors] = field(default_factory=lambda: defaultdict(CarriedTensors))
    loss_sum: Tensor | None = None
    squares: dict[int, Tensor] = field(default_factory=dict)
    home_squares: dict[int, Tensor] = field(default_factory=dict)
    home_loss_sum: Tensor | None = None
    loss_is_finite: bool = True
    nonfinite_blocks: list[int] = field(default_factory=list)
    updating: set[int] = field(default_factory=set)
    """Blocks whose update has begun."""
    updated: set[int] = field(default_factory=set)
    """Blocks whose update is done, and on the disk if they live there."""

    def give_up_saved(self) -> bool:
        """Let all graphs go; what they were made from stays.  Whether there were any."""
        graphs = [place for place, (_, output) in self.saved.items() if output is not None]
        for place in graphs:
            self.saved[place] = (self.saved[place][0], None)
        return bool(graphs)
