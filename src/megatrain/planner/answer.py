"""Does it fit, and how fast will it be: a placement, its bytes by tier, its simulated step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.errors import NoRoomError
from megatrain.layout import STATE, BlockLayout, Purpose
from megatrain.planner.disk import DiskUse, check_disk, disk_use, tier_for, with_disk
from megatrain.planner.fit import MemoryNeed, memory_need
from megatrain.planner.placement import Placement, PlacementRule
from megatrain.schedule import Lane, occupancy
from megatrain.units import format_bytes, format_enough

ON_PAPER = Path("the disk")
"""Nothing is written: a machine that is not here has no path."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a run of these options would be."""

    placement: Placement
    need: MemoryNeed
    lanes_busy: Mapping[Lane, float]
    """Share of a step."""
    checkpoint_bytes: int
    tokens: int
    """Of a step."""
    model_flops: float
    """Of a step: forward and backward, no recompute."""
    disk: DiskUse | None = None
    """None if no state lives there."""

    @property
    def time_known(self) -> bool:
        """If not, a step takes longer than `placement` says: the disk's rate is not known."""
        return self.disk is None or self.disk.rates is not None

    @property
    def limit(self) -> Lane:
        """The busiest lane."""
        return max(self.lanes_busy, key=lambda lane: self.lanes_busy[lane])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.placement.seconds

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Tier -> purpose -> bytes, without what is empty."""
        tiers = {
            "device": dict(self.placement.device),
            "host": dict(self.need.host),
            "disk": {
                "a checkpoint": self.checkpoint_bytes,
                "state of layers": 0 if self.disk is None else self.disk.nbytes,
            },
        }
        return {tier: {k: n for k, n in parts.items() if n} for tier, parts in tiers.items()}

    def figures(self) -> dict[str, Any]:
        """For a program to read; times are null where they are not known."""
        seconds = self.placement.seconds
        times: dict[str, Any] = {
            "seconds_per_step": seconds,
            "tokens_per_second": self.tokens_per_s,
            "model_tflops": self.model_flops / seconds / 1e12,
            "lanes_busy": {lane.value: share for lane, share in self.lanes_busy.items()},
            "limit": self.limit.value,
        }
        disk = None
        if self.disk is not None:
            disk = self.disk.figures()
            del disk["path"]
        return {
            "fits": True,
            "bytes": self.bytes_by_tier(),
            "resident_blocks": sorted(self.placement.resident),
            "saved_layers": sorted(self.placement.saved),
            "spilled_layers": sorted(self.placement.spill.blocks) if self.placement.spill else [],
            "put_off_updates": sorted(self.placement.put_off),
            "disk": disk,
        } | (times if self.time_known else dict.fromkeys(times))


@dataclass(frozen=True, kw_only=True)
class DiskRoom:
    """A disk for the state of layers."""

    nbytes: int
    """That may be used."""
    rates: tuple[float, float] | None
    """Bytes read and written in a second, both at once; None: not known."""


def answer(
    rule: PlacementRule,
    *,
    tokens: int,
    model_flops: float,
    beside: Callable[[bool], dict[str, int]],
    checkpoint_bytes: int,
    room: DiskRoom | None = None,
) -> Answer:
    """Place, and simulate a step.

    Args:
        rule: layouts, plan, costs and budgets.
        tokens: of a step.
        model_flops: of a step.
        beside: bytes of the host that checkpoints take, by purpose, given whether any state is on
            the disk; the rule's budget leaves out those without a disk.
        checkpoint_bytes: of one on the disk.
        room: on a disk, for what the host cannot hold.

    Raises:
        UserError: if it does not fit the device, the host or the disk.
    """
    placement, disk = rule.place(), None
    if room is not None:
        disk = _disk(rule, placement, room)
    if disk is not None:
        rule = with_disk(rule, disk)
        placement = rule.simulated(replace(placement, on_disk=disk.tier.blocks))
    need = memory_need(rule.layouts, rule.laid_out(placement), gradient_dtype=rule.gradient_dtype)
    of_checkpoints = beside(disk is not None)
    need = replace(need, host=need.host | of_checkpoints)
    budget = rule.host_budget + sum(beside(False).values())
    if need.host_total > budget:
        raise HostTooSmallError(need.host_total, budget)
    return Answer(
        placement=placement,
        need=need,
        lanes_busy=occupancy(rule.spans(placement)),
        checkpoint_bytes=checkpoint_bytes,
        tokens=tokens,
        model_flops=model_flops,
        disk=disk,
    )


def _disk(rule: PlacementRule, placement: Placement, room: DiskRoom) -> DiskUse | None:
    """What lives there; None if the host has room for everything.

    Raises:
        UserError: if there is no room for it.
    """
    plan = rule.laid_out(placement)
    tier = tier_for(
        rule.layouts,
        plan,
        gradient_dtype=rule.gradient_dtype,
        host_budget=rule.host_budget,
        path=ON_PAPER,
        asked=rule.offload.disk,
    )
    if tier is None:
        return None
    check_disk(tier, tier.nbytes(rule.layouts), budget=room.nbytes, allowed=True)
    return disk_use(
        rule.layouts,
        replace(plan, on_disk=tier.blocks),
        tier,
        gradient_dtype=rule.gradient_dtype,
        rates=room.rates,
    )


def state_bytes(layouts: Sequence[BlockLayout], purposes: Sequence[Purpose] = STATE) -> int:
    """Weights, residuals and moments, or some of them."""
    return sum(layout.nbytes(purpose) for layout in layouts for purpose in purposes)


class HostTooSmallError(NoRoomError):
    """Even with all of the device in use the host cannot hold the rest.

    Args:
        needed: bytes.
        budget: bytes.
    """

    def __init__(self, needed: int, budget: int) -> None:
        self.needed = needed
        super().__init__(
            asked=f"host memory {format_bytes(budget)}",
            found=f"{format_enough(needed)} needed beside what the GPU holds",
            change="see below",
        )
