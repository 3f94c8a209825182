"""Before the state is allocated: what fits where, measured and decided; `plan_run` is the door."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.engine import EngineOptions, Loss, check_options, step_plan
from megatrain.engine.device import DEVICE_RESERVE, free_device_bytes, limit_device_memory
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.kept_rates import run_disk_rates, stored_calibration
from megatrain.engine.options import largest_shape, with_tokens_of_a_step
from megatrain.engine.programs import Programs
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.memory import DiskTier
from megatrain.models import BlockKind, BlockModel
from megatrain.models.parts import FEWEST, in_parts, num_experts
from megatrain.planner import (
    NOTHING_ASKED,
    DiskUse,
    MemoryNeed,
    Offload,
    Placement,
    PlacementRule,
    available_host_bytes,
    check_disk,
    check_fits,
    disk_use,
    memory_need,
    more_than_there_is,
    tier_for,
    with_disk,
)
from megatrain.schedule import Footprint, Rates, StepPlan, slot_sizes
from megatrain.units import format_bytes

WAITING_GRADIENT_SLOTS = 6
"""Without clipping, if the host has room for them: the host's updates may fall so far behind."""
SHARE_OF_SLOTS = 0.6
"""Of the GPU's memory; what slots leave is for activations.  Where layers need more, experts are
streamed in parts."""
FRAGMENTED = 0.01
"""Share of the GPU's memory that is not planned for: it is lost between tensors."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that the process may use, and what was asked to be put where."""

    gpu: int | None = None
    """None for what is free."""
    host: int | None = None
    """The same."""
    checkpoint: int = 0
    """Of the host's: for checkpoints on their way."""
    disk_path: Path | None = None
    """Directory for state that the host has no room for; None: there is none."""
    disk: int | None = None
    """Of scratch space there; None for what is free."""
    offload: Offload = NOTHING_ASKED

    @property
    def scratch_bytes(self) -> int:
        """Of scratch space that there may be."""
        if self.disk_path is None:
            return 0
        found = os.statvfs(self.disk_path)
        free = found.f_bavail * found.f_frsize
        return free if self.disk is None else min(free, self.disk)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How a run is laid out."""

    options: EngineOptions
    """As asked for, and which layers are saved."""
    programs: Programs
    need: MemoryNeed
    placement: Placement | None
    """None on the CPU, where everything is in one memory."""
    rates: Rates | None = None
    """Of the machine, with which it was placed; None on the CPU."""
    disk: DiskUse | None = None
    """None if nothing lives there."""
    notices: tuple[str | None, ...] = ()
    """What a user should hear of host memory and of kept rates; None: there is nothing to say."""
    asked: str = ""
    """What of it was asked for."""

    def in_words(self) -> str:
        """Where the bytes are."""
        host = f"host memory {format_bytes(self.need.host_total)} ({self.need.table()})"
        asked = [f"as asked for in offload: {self.asked}"] if self.asked else []
        words = [each.in_words() for each in (self.placement, self.disk) if each]
        return "\n".join([host, *words, *asked, *filter(None, self.notices)])

    @property
    def resident(self) -> frozenset[int]:
        """Blocks whose state lives on the device."""
        return frozenset() if self.placement is None else self.placement.resident

    @property
    def tier(self) -> DiskTier | None:
        """Blocks whose state lives on the disk."""
        return None if self.disk is None else self.disk.tier


def device_limit(device: torch.device, budget: int | None) -> int | None:
    """Bytes for tensors on a GPU; None on the CPU."""
    free = free_device_bytes(device)
    return None if free is None else min(free, budget or free) - DEVICE_RESERVE


def parts_that_fit(
    model: BlockModel,
    options: EngineOptions,
    *,
    limit: int,
    cut: Callable[[int], BlockModel] | None = None,
) -> int | None:
    """In how many blocks the experts of a layer are to be streamed; None: with their layer.

    The fewest with which slots leave room for activations; if none do, the fewest with which
    slots fit at all.

    Args:
        model: of whole layers.
        options: of the engine.
        limit: bytes for tensors on the device.
        cut: `in_parts` of the model; what it has found before need not be found again.

    Raises:
        UserError: if a layer does not fit whole, and its experts cannot be streamed in parts.
    """
    whole = _slot_bytes(model, options)
    if whole <= SHARE_OF_SLOTS * limit or not num_experts(model):
        return None
    cut = cut or partial(in_parts, model)
    fitting = None if whole > limit else 0  # 0: whole layers
    parts = 2
    while parts <= num_experts(model) // FEWEST:
        try:
            nbytes = _slot_bytes(cut(parts), options)
        except UserError:
            if fitting == 0:
                return None
            raise
        if nbytes <= SHARE_OF_SLOTS * limit:
            return parts
        fitting = parts if fitting is None and nbytes <= limit else fitting
        parts *= 2
    return fitting or None


def check_offload_of_parts(offload: Mapping[str, Any], model: BlockModel) -> None:
    """Layers are named by their numbers there, and are no blocks where their experts are in parts.

    Raises:
        UserError: if both are asked for.
    """
    if offload and model.stages:
        raise UserError(
            asked="offload of a model whose experts are streamed in parts",
            found="layers that are several blocks",
            change="leave offload out, or expert_parts, with gpu_memory that whole layers fit in",
        )


def _slot_bytes(model: BlockModel, options: EngineOptions) -> int:
    """On the device, with nothing resident."""
    streamed = [block.layout for block in model.blocks if block.kind is not BlockKind.UNUSED]
    plan = step_plan(model, options)
    return slot_sizes(streamed, plan, check_options(model, options)).device


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
    options = with_slots(options, budgets)
    need = _need(model, options, step_plan(model, options), budgets)
    free = free_device_bytes(device)
    on_device = 0 if free is None else min(free, budgets.gpu or free)
    elsewhere = on_device + budgets.scratch_bytes
    check_fits(need, budget=budgets.host, device_free=free, elsewhere=elsewhere)


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
        num_rows, longest: of a step; tokens of its longest row.
        budgets: of the process.
        place: auto; host: nothing stays on the GPU; device: all state does.

    Raises:
        UserError: if the run does not fit.
    """
    options = with_tokens_of_a_step(model, options, num_rows=num_rows, longest=longest)
    options = with_slots(options, budgets)
    programs = Programs.of(model, options)
    free = free_device_bytes(device)
    if free is None:
        return _plan_on_cpu(model, options, programs, budgets)
    limit = device_limit(device, budgets.gpu)
    assert limit is not None
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
    options = replace(options, **placement.for_engine)
    plan, disk = _with_disk(model, options, rule.laid_out(placement), budgets, has_gpu=True)
    if disk is not None:
        rule = with_disk(rule, disk)
        placement = rule.simulated(replace(placement, on_disk=disk.tier.blocks))
    need = _need(model, options, plan, budgets)
    check_fits(need, budget=budgets.host, device_free=free)
    return RunPlan(
        options=options,
        programs=programs,
        need=need,
        placement=placement,
        rates=rule.footprint.rates,
        disk=disk,
        asked=budgets.offload.words,
        notices=(more_than_there_is(need.host_total), stored_calibration().words),
    )


def _plan_on_cpu(
    model: BlockModel, options: EngineOptions, programs: Programs, budgets: Budgets
) -> RunPlan:
    """Slots take host memory too.  Layers are saved only if that was asked for: activations are
    not counted.
    """
    options = replace(options, saved=budgets.offload.saved or options.saved)
    plan, disk = _with_disk(model, options, step_plan(model, options), budgets, has_gpu=False)
    need = _need(model, options, plan, budgets)
    check_fits(need, budget=budgets.host, device_free=None)
    return RunPlan(
        options=options,
        programs=programs,
        need=need,
        placement=None,
        disk=disk,
        asked=budgets.offload.words,
        notices=(
            more_than_there_is(need.host_total + need.device_slots),
            stored_calibration().words_of_disk(disk.tier.path) if disk else None,
        ),
    )


def with_slots(options: EngineOptions, budgets: Budgets) -> EngineOptions:
    """As many slots as were asked for, and what was asked to be put off."""
    asked: dict[str, Any] = dict(budgets.offload.slots)
    return replace(options, put_off=budgets.offload.put_off or frozenset(), **asked)


def _with_disk(
    model: BlockModel, options: EngineOptions, plan: StepPlan, budgets: Budgets, *, has_gpu: bool
) -> tuple[StepPlan, DiskUse | None]:
    """The plan with state on the disk that the host has no room for, if there may be any."""
    if budgets.disk_path is None:
        return plan, None
    need = _need(model, options, plan, budgets)
    beside = budgets.checkpoint + (0 if has_gpu else need.device_slots)
    layouts = [block.layout for block in model.blocks]
    gradient_dtype = check_options(model, options)
    tier = tier_for(
        layouts,
        plan,
        gradient_dtype=gradient_dtype,
        host_budget=(budgets.host or available_host_bytes()) - beside,
        path=budgets.disk_path,
        asked=budgets.offload.disk,
    )
    if tier is None:
        return plan, None
    plan = replace(plan, on_disk=tier.blocks)
    nbytes = tier.nbytes(layouts)
    room = budgets.scratch_bytes
    check_disk(tier, nbytes, budget=room, allowed=room == budgets.disk)
    rates = run_disk_rates(tier.path, nbytes)
    return plan, disk_use(layouts, plan, tier, gradient_dtype=gradient_dtype, rates=rates)


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
    beside = checkpoint_purposes(model, budgets.checkpoint, on_disk=False)
    return PlacementRule(
        layouts=[block.layout for block in model.blocks],
        plan=replace(step_plan(model, options), num_micro=num_micro),
        gradient_dtype=check_options(model, options),
        footprint=footprint,
        budget=int(device_limit * (1 - FRAGMENTED)),
        host_budget=(budgets.host or available_host_bytes()) - sum(beside.values()),
        offload=budgets.offload,
    )


def with_room_for_waiting(
    model: BlockModel, options: EngineOptions, budgets: Budgets
) -> EngineOptions:
    """More gradients that wait for the host's updates, if the host has room with all else there."""
    more = replace(options, waiting_gradient_slots=WAITING_GRADIENT_SLOTS)
    more = with_slots(more, budgets)
    need = _need(model, more, step_plan(model, more), budgets).host_total
    return more if need <= (budgets.host or available_host_bytes()) else options


def _need(
    model: BlockModel, options: EngineOptions, plan: StepPlan, budgets: Budgets
) -> MemoryNeed:
    need = memory_need(
        [block.layout for block in model.blocks],
        plan,
        gradient_dtype=check_options(model, options),
    )
    beside = checkpoint_purposes(model, budgets.checkpoint, on_disk=bool(plan.on_disk))
    return replace(need, host=need.host | beside)


def checkpoint_purposes(model: BlockModel, pool: int, *, on_disk: bool) -> dict[str, int]:
    """Bytes of the host that checkpoints take, by purpose.

    Where layers are cut that is, beside the pool, one layer's weights as its file has them; of
    blocks on the disk one layer's moments too.
    """
    if not pool or model.uncut is None:
        return {"checkpoint": pool}
    purposes = (Purpose.WEIGHT, Purpose.EXP_AVG) if on_disk else (Purpose.WEIGHT,)
    layouts = [block.layout for block in model.whole.blocks]
    joined = max(sum(layout.nbytes(purpose) for purpose in purposes) for layout in layouts)
    return {"checkpoint": pool, "joined experts": joined}
