"""Before the state is allocated: what fits where, measured and decided; `plan_run` is the door."""

from dataclasses import dataclass, replace

import torch

from megatrain.engine import EngineOptions, Loss, check_options, step_plan
from megatrain.engine.compute import Programs
from megatrain.engine.device import DEVICE_RESERVE, free_device_bytes, limit_device_memory
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.options import largest_shape, with_tokens_of_a_step
from megatrain.memory.store import STATE
from megatrain.models import BlockModel
from megatrain.planner import MemoryNeed, Placement, PlacementRule, check_fits, memory_need
from megatrain.planner.fit import available_host_bytes
from megatrain.schedule import Footprint
from megatrain.units import format_bytes

WAITING_GRADIENT_SLOTS = 6
"""Without clipping, if the host has room for them: the host's updates may fall so far behind."""
FRAGMENTED = 0.01
"""Share of the GPU's memory that is not planned for: it is lost between tensors."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that the process may use."""

    gpu: int | None = None
    """None for what is free."""
    host: int | None = None
    """The same."""
    checkpoint: int = 0
    """Of the host's: for checkpoints on their way."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How a run is laid out."""

    options: EngineOptions
    """As asked for, and which layers are saved."""
    programs: Programs
    need: MemoryNeed
    placement: Placement | None
    """None on the CPU, where everything is in one memory."""

    def in_words(self) -> str:
        """Where the bytes are."""
        host = f"host memory {format_bytes(self.need.host_total)} ({self.need.table()})"
        return host if self.placement is None else f"{host}\n{self.placement.in_words()}"

    @property
    def resident(self) -> frozenset[int]:
        """Blocks whose state lives on the device."""
        return frozenset() if self.placement is None else self.placement.resident


def check_options_and_memory(
    model: BlockModel,
    options: EngineOptions,
    *,
    device: torch.device,
    budgets: Budgets,
) -> None:
    """Refuse at once what can never fit, wherever its parts are put.

    Raises:
        UserError: for options without sense, or too little memory.
    """
    need = _need(model, options, frozenset(), budgets)
    free = free_device_bytes(device)
    on_device = 0 if free is None else min(free, budgets.gpu or free)
    check_fits(need, budget=budgets.host, device_free=free, on_device=on_device)


def plan_run(
    model: BlockModel,
    options: EngineOptions,
    *,
    device: torch.device,
    loss: Loss,
    num_rows: int,
    longest: int,
    budgets: Budgets,
    place: str = "auto",
) -> RunPlan:
    """Measure a micro-batch, then place state and activations.

    Args:
        model: the blocks.
        options: of the engine.
        device: where blocks are computed.
        loss: of the run.
        num_rows: of a step.
        longest: tokens of the longest row.
        budgets: of the process.
        place: auto; host: nothing stays on the GPU; device: all state does.

    Raises:
        UserError: if the run does not fit.
    """
    options = with_tokens_of_a_step(model, options, num_rows=num_rows, longest=longest)
    programs = Programs.of(model, options)
    free = free_device_bytes(device)
    if free is None:
        need = _need(model, options, frozenset(), budgets)
        check_fits(need, budget=budgets.host, device_free=None)
        return RunPlan(options=options, programs=programs, need=need, placement=None)
    limit = min(free, budgets.gpu or free) - DEVICE_RESERVE
    limit_device_memory(device, limit)
    rows, length, num_micro = largest_shape(model, options, num_rows=num_rows, longest=longest)
    options = with_room_for_waiting(model, options, budgets)
    footprint = measure_footprint(
        model, options, shape=(rows, length), device=device, loss=loss, programs=programs
    )
    rule = placement_rule(
        model, options, footprint, num_micro=num_micro, device_limit=limit, budgets=budgets
    )
    placement = rule.place() if place == "auto" else rule.fixed(on_device=place == "device")
    options = replace(options, saved=placement.saved, spill=placement.spill)
    need = _need(model, options, placement.resident, budgets)
    check_fits(need, budget=budgets.host, device_free=free)
    return RunPlan(options=options, programs=programs, need=need, placement=placement)


def placement_rule(
    model: BlockModel,
    options: EngineOptions,
    footprint: Footprint,
    *,
    num_micro: int,
    device_limit: int,
    budgets: Budgets,
) -> PlacementRule:
    """The rule of a run.

    Args:
        model: the blocks.
        options: of the engine, with room for waiting gradients.
        footprint: measured or estimated.
        num_micro: the most micro-batches of a step.
        device_limit: bytes for tensors on the device.
        budgets: of the process.
    """
    return PlacementRule(
        layouts=[block.layout for block in model.blocks],
        plan=replace(step_plan(model, options), num_micro=num_micro),
        gradient_dtype=check_options(model, options),
        footprint=footprint,
        budget=int(device_limit * (1 - FRAGMENTED)),
        host_budget=(budgets.host or available_host_bytes()) - budgets.checkpoint,
    )


def default_checkpoint_memory(model: BlockModel) -> int:
    """Bytes for checkpoints on their way: the state of two blocks."""
    return 2 * max(sum(b.layout.nbytes(purpose) for purpose in STATE) for b in model.blocks)


def with_room_for_waiting(
    model: BlockModel, options: EngineOptions, budgets: Budgets
) -> EngineOptions:
    """More gradients that wait for the host's updates, if the host has room with all else there."""
    more = replace(options, waiting_gradient_slots=WAITING_GRADIENT_SLOTS)
    need = _need(model, more, frozenset(), budgets).host_total
    return more if need <= (budgets.host or available_host_bytes()) else options


def _need(
    model: BlockModel, options: EngineOptions, resident: frozenset[int], budgets: Budgets
) -> MemoryNeed:
    need = memory_need(
        [block.layout for block in model.blocks],
        step_plan(model, options, resident=resident),
        gradient_dtype=check_options(model, options),
    )
    return replace(need, host=need.host | {"checkpoint": budgets.checkpoint})
