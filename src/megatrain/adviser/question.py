"""A run that might be: what `plan` is asked about."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.checkpoint import pool_bytes
from megatrain.engine import EngineOptions
from megatrain.engine.kept_rates import GpuRates
from megatrain.hardware import Gpu
from megatrain.models import BlockModel
from megatrain.planner.answer import DiskRoom, state_bytes
from megatrain.planner.estimate import rates_of
from megatrain.schedule import Rates

UNLIMITED = 2**60
"""Bytes; more than any machine has."""
COMPILED = EngineOptions(compile_backend="inductor")
"""As on a GPU by default."""


def whole_state(model: BlockModel) -> int:
    """Bytes of a checkpoint from which a run can go on."""
    return state_bytes([block.layout for block in model.blocks])


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a run trains, beside what a `Question` varies."""

    engine: EngineOptions = COMPILED
    """Its micro_batch_tokens go before a question's micro_rows."""
    expert_parts: int | None = None
    """Blocks of a layer's experts; None: as the GPU needs."""
    checkpoint_memory: Callable[[BlockModel], int] = pool_bytes
    """Bytes of the host for checkpoints on their way."""
    checkpoint_bytes: Callable[[BlockModel], int] = whole_state
    """Of a checkpoint on the disk."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run that might be."""

    model: str
    """Directory with a config.json, or an id."""
    rows: int = 32
    """Of a step."""
    length: int = 1024
    """Tokens of a row."""
    micro_rows: int = 16
    """Rows of a micro-batch."""
    max_grad_norm: float = 1.0
    """0 turns clipping off."""
    gpu: Gpu
    gpu_memory: int | None = None
    """Bytes; None for all of it."""
    host_memory: int | None = None
    """Bytes; None for what is free here."""
    update_params_per_s: float
    """Of the host."""
    measured: GpuRates | None = None
    """Of this GPU; None: as its data sheet has them."""
    disk_memory: int | None = None
    """Bytes of a disk for state that the host has no room for; None: there is none."""
    disk_bytes_per_s: float | None = None
    """Read and written there, both at once; None: not known."""
    offload: Mapping[str, Any] = field(default_factory=dict)
    """See the config's key."""
    training: Training = Training()
    """What no change that is tried is about."""

    @property
    def device_memory(self) -> int:
        """Bytes that the run may use."""
        return min(self.gpu.memory_bytes, self.gpu_memory or UNLIMITED)

    @property
    def options(self) -> EngineOptions:
        """As the trainer would have them."""
        tokens = self.micro_tokens
        return replace(
            self.training.engine,
            micro_batch_rows=self.micro_rows,
            micro_batch_tokens=None if tokens is None else min(tokens, self.tokens),
            max_grad_norm=self.max_grad_norm,
            length_multiple=self.length,
        )

    @property
    def rates(self) -> Rates:
        """Of the machine."""
        updates = self.update_params_per_s
        if self.measured is None:
            return rates_of(self.gpu, update_params_per_s=updates)
        return self.measured.beside(updates)

    @property
    def micro_tokens(self) -> int | None:
        """Padded tokens of a micro-batch; None: micro_rows decide."""
        return self.training.engine.micro_batch_tokens

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length

    @property
    def disk_room(self) -> DiskRoom | None:
        """Of a disk for state; None: there is none."""
        if self.disk_memory is None:
            return None
        rate = self.disk_bytes_per_s
        return DiskRoom(nbytes=self.disk_memory, rates=None if rate is None else (rate, rate))

    def with_checkpoint_memory(self, nbytes: int) -> "Question":
        """The same with so much of the host for checkpoints on their way."""
        training = replace(self.training, checkpoint_memory=lambda _: nbytes)
        return replace(self, training=training)

    def with_expert_parts(self, parts: int) -> "Question":
        """The same with a layer's experts in so many blocks."""
        return replace(self, training=replace(self.training, expert_parts=parts))

    def with_micro_tokens(self, tokens: int) -> "Question":
        """The same in micro-batches of so many."""
        engine = replace(self.training.engine, micro_batch_tokens=tokens)
        return replace(self, training=replace(self.training, engine=engine))
