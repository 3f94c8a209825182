"""What spare GPU memory is spent on: state of blocks, and activations instead of recompute.

Tried are: state of the first blocks (with clipping their updates delay the next forward, without
they have no backward left to hide behind), every number of them, with or without the head's; beside
it saved activations of as many of the first layers as fit; inputs of layers on the device or on the
host, so that their place holds state.  The best by a rough estimate are simulated; the fastest is
taken.  Without clipping some updates may run beside the next forward, if the host has room for
their gradients till then.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megatrain.errors import NoRoomError
from megatrain.layout import STATE, BlockLayout
from megatrain.planner.durations import Durations
from megatrain.planner.fit import memory_need
from megatrain.planner.offload import NOTHING_ASKED, Offload
from megatrain.planner.rough import rough_seconds, updates_to_put_off
from megatrain.schedule import (
    Footprint,
    Span,
    Spill,
    StepPlan,
    build_step,
    simulate,
    slot_sizes,
)
from megatrain.units import format_bytes, format_enough

NONE: frozenset[int] = frozenset()
SPILL_PRICE = 1.02
SIMULATED = 24
"""Placements, the best by the rough estimate, whose steps are simulated."""
WORTH_PUTTING_OFF = 0.99
"""Of a step's time without: gradients that wait longer take memory of the host."""
FOR_OTHERS = 0.05
"""Of the host's budget, not taken by such gradients: what is free may be less in a moment."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where blocks live, and what is not recomputed."""

    resident: frozenset[int]
    """Blocks whose state lives on the device."""
    saved: frozenset[int]
    """Layers whose activations stay from forward to backward."""
    spill: Spill | None
    device: Mapping[str, int]
    """Bytes on the device at their peak, by purpose."""
    seconds: float
    """Of a step of the largest shape, simulated."""
    on_disk: frozenset[int] = NONE
    """Blocks whose state lives on the disk."""
    put_off: frozenset[int] = NONE
    """Without clipping: blocks whose updates run beside the next forward."""

    @property
    def device_bytes(self) -> int:
        """All of them."""
        return sum(self.device.values())

    @property
    def for_engine(self) -> dict[str, Any]:
        """What of it is in the engine's options."""
        return {"saved": self.saved, "spill": self.spill, "put_off": self.put_off}

    def in_words(self) -> str:
        """One line for a person."""
        return (
            f"GPU memory {format_bytes(self.device_bytes)}: state of {len(self.resident)} blocks,"
            f" activations of {len(self.saved)} layers"
            + ("" if self.spill is None else f"; inputs of {len(self.spill.blocks)} on the host")
            + (f"; {len(self.put_off)} updates put off" if self.put_off else "")
            + f"; a step should take about {self.seconds:.3g} s"
        )


@dataclass(frozen=True, kw_only=True)
class PlacementRule:
    """Finds the placement.

    `plan` has no placement yet; its number of micro-batches is the largest of any step.
    """

    layouts: Sequence[BlockLayout]
    """Embed, layers, head and, behind them, unused parameters if there are any."""
    plan: StepPlan
    gradient_dtype: str
    footprint: Footprint
    budget: int
    """Bytes on the device that the run may use."""
    host_budget: int
    """The same on the host."""
    offload: Offload = NOTHING_ASKED
    """What was asked for is so in every placement that is tried."""

    def place(self) -> Placement:
        """The placement with the shortest estimated step.

        Raises:
            NoRoomError: if not even one layer at a time fits the budget.
        """
        prefixes = [frozenset(range(count)) for count in range(self.plan.head + 1)]
        residents = [*prefixes, *(prefix | {self.plan.head} for prefix in prefixes[1:])]
        if self.offload.resident is not None:
            residents = [self.offload.resident]
        starts = [
            self.placement(resident, self.offload.saved or NONE, spills=spills)
            for spills in ((False, True) if self.offload.spilled is None else (False,))
            for resident in residents
            if not resident & self.offload.not_resident
        ]
        tried = [self._with_saved(p) for p in starts if p.device_bytes <= self.budget]
        if not tried:
            self._refuse(min(starts, key=lambda placement: placement.device_bytes))
        fit = [placement for placement in tried if self._host_bytes(placement) <= self.host_budget]
        # What does not fit is refused later, with what it needs: the least for the host.
        candidates = sorted(fit or [min(tried, key=self._host_bytes)], key=_priced_seconds)
        return min(map(self.simulated, candidates[:SIMULATED]), key=_priced_seconds)

    def simulated(self, placement: Placement) -> Placement:
        """The same, with the time that a step's own list of operations takes; updates are put off
        where that is faster and there is room.
        """
        found = self._timed(placement)
        if self.offload.put_off is not None or not (put_off := self._put_off(placement)):
            return found
        later = self._timed(replace(placement, put_off=put_off))
        return later if later.seconds < WORTH_PUTTING_OFF * found.seconds else found

    def _timed(self, placement: Placement) -> Placement:
        return replace(placement, seconds=max(span.end_s for span in self.spans(placement)))

    def _put_off(self, placement: Placement) -> frozenset[int]:
        """As many of the first of those that are worth it as the host has room for: their updates
        come last in the backward.  None beside a disk, which is there for want of room.
        """
        if self.plan.clip or placement.on_disk or self.offload.disk:
            return NONE
        wanted = sorted(updates_to_put_off(self.laid_out(placement), self.layouts, self.footprint))

        def too_large(count: int) -> bool:
            first = replace(placement, put_off=frozenset(wanted[:count]))
            return self._host_bytes(first) > (1 - FOR_OTHERS) * self.host_budget

        return frozenset(wanted[: bisect_left(range(1, len(wanted) + 1), True, key=too_large)])

    def spans(self, placement: Placement) -> list[Span]:
        """A step, simulated."""
        plan = replace(self.laid_out(placement), pending=True)
        durations = Durations(
            layouts=self.layouts,
            plan=plan,
            gradient_dtype=self.gradient_dtype,
            footprint=self.footprint,
        )
        return simulate(build_step(plan), durations)

    def laid_out(self, placement: Placement) -> StepPlan:
        """The plan with this placement."""
        return replace(
            self.plan,
            resident=placement.resident,
            saved=placement.saved,
            spill=placement.spill,
            on_disk=placement.on_disk,
            put_off=placement.put_off,
        )

    def _refuse(self, placement: Placement) -> NoReturn:
        raise NoRoomError(
            asked=f"train within {format_bytes(self.budget)} of GPU memory, beside what is left to"
            " CUDA and to gaps",
            found=f"{format_enough(placement.device_bytes)} needed with the state of"
            f" {len(placement.resident)} blocks there: {format_bytes(self._slots(self.plan))}"
            f" of slots, {format_bytes(self.footprint.workspace_bytes)} of workspace, and"
            f" activations of {self.plan.num_micro} micro-batches",
            change="raise gpu_memory, or lower per_device_train_batch_size,"
            " gradient_accumulation_steps, micro_batch_tokens or max_length"
            + (", or ask for less in offload" if self.offload.words else ""),
        )

    def fixed(self, *, on_device: bool) -> Placement:
        """Everything streamed, or the state of every block on the device; all layers recomputed.

        Raises:
            NoRoomError: if it does not fit the budget.
        """
        blocks = range(self.plan.head + 1) if on_device else ()
        placement = self.placement(frozenset(blocks), NONE)
        if placement.device_bytes > self.budget:
            self._refuse(placement)
        return self.simulated(placement)

    def _with_saved(self, best: Placement) -> Placement:
        """All layers saved if they fit, else as many of the first as fit.

        These are the resident ones, whose weights need no slot of their own to stay; and without
        clipping the host, whose updates begin with the last layers, is given more time for them.
        """
        trained = range(max(self.plan.lowest_trainable, 1), self.plan.num_layers + 1)
        layers = [layer for layer in trained if layer not in self.offload.not_saved]
        if self.offload.saved is not None or not layers:
            return best

        def first(count: int) -> Placement:
            spills = best.spill is not None
            return self.placement(best.resident, frozenset(layers[:count]), spills=spills)

        def too_large(count: int) -> bool:
            return first(count).device_bytes > self.budget

        # With the last of the largest layers, shared weight slots shrink: more saved may be fewer
        # bytes.  Where bisection ends fits all the same, and one more does not: of such numbers it
        # may find a larger one than the first, never a smaller one.
        most = len(layers)
        fit = bisect_left(range(1, most), True, key=too_large) if too_large(most) else most
        return first(fit) if fit else best

    def placement(
        self, resident: frozenset[int], saved: frozenset[int], *, spills: bool = False
    ) -> Placement:
        spill = self._spill(saved) if spills or self.offload.spilled else None
        asked = (self.offload.put_off or NONE) - resident
        put_off = frozenset(block for block in asked if self.plan.trainable[block])
        plan = replace(self.plan, resident=resident, saved=saved, spill=spill, put_off=put_off)
        return Placement(
            resident=resident,
            saved=saved,
            spill=spill,
            device=self._device_bytes(plan),
            seconds=self._rough_seconds(plan),
            put_off=plan.put_off,
        )

    def _rough_seconds(self, plan: StepPlan) -> float:
        """As if the host had room for what is put off: `simulated` looks."""
        if not plan.clip and self.offload.put_off is None:
            put_off = updates_to_put_off(plan, self.layouts, self.footprint)
            plan = replace(plan, put_off=put_off)
        return rough_seconds(plan, self.layouts, self.footprint)

    def _device_bytes(self, plan: StepPlan) -> dict[str, int]:
        """By purpose, all at their peak at once."""
        cost = self.footprint
        slots = slot_sizes(self.layouts[: plan.head + 1], plan, self.gradient_dtype)
        trained = range(max(plan.lowest_trainable, 1), plan.num_layers + 1)
        recomputed = [
            layer for layer in trained if layer not in plan.saved | plan.spilled | plan.additive
        ]
        return {
            **{
                purpose.value: sum(self.layouts[block].nbytes(purpose) for block in plan.resident)
                for purpose in STATE
            },
            "gradient": sum(slots.resident_gradients.values()),
            "weight slots": sum(slots.weights),
            "gradient sums": sum(slots.accumulators),
            "gradients on their way": sum(slots.staging),
            "inputs on their way": sum(slots.passing),
            # Of layers that are recomputed, and the last output and its gradient.
            "inputs of layers": plan.num_micro * (len(recomputed) + 2) * cost.input_bytes,
            "saved activations": plan.num_micro
            * sum(cost.saved_bytes[layer - 1] for layer in plan.saved),
            "carried tensors": plan.num_micro * cost.carried_bytes,
            "masks and positions": plan.num_micro * cost.calls_bytes,
            "workspace": cost.workspace_bytes,
        }

    def _spill(self, saved: frozenset[int]) -> Spill:
        """Of every layer whose input waits for backward, or of those that were asked for."""
        layers = frozenset(range(max(self.plan.lowest_trainable, 1), self.plan.num_layers + 1))
        asked = self.offload.spilled
        return Spill(
            blocks=(layers - saved if asked is None else asked) - self.plan.additive,
            input_bytes=self.footprint.input_bytes,
            num_micro=self.plan.num_micro,
        )

    def _host_bytes(self, placement: Placement) -> int:
        plan = replace(self.laid_out(placement), on_disk=self.offload.disk or NONE)
        return memory_need(self.layouts, plan, gradient_dtype=self.gradient_dtype).host_total

    def _slots(self, plan: StepPlan) -> int:
        return slot_sizes(self.layouts[: plan.head + 1], plan, self.gradient_dtype).device


def _priced_seconds(placement: Placement) -> float:
    """Inputs that cross the bus seem free where updates or computation hide them; they have a small
    price all the same, so that they stay where there is nothing to win.
    """
    return placement.seconds * (1 if placement.spill is None else SPILL_PRICE)
