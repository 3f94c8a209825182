"""Which blocks live on the disk, and what a step reads and writes there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.errors import NoRoomError
from megatrain.layout import BlockLayout
from megatrain.memory import DiskTier
from megatrain.planner.fit import memory_need
from megatrain.planner.placement import PlacementRule
from megatrain.schedule import StepPlan, build_step, disk_traffic
from megatrain.units import format_bytes, format_enough


def blocks_on_disk(
    layouts: Sequence[BlockLayout], plan: StepPlan, *, gradient_dtype: str, host_budget: int
) -> frozenset[int]:
    """As few of the last layers as make the rest fit the host; none if everything does.

    The last, because with clipping their updates are due last: the disk has the time of all layers
    before them.  If nothing makes it fit, what needs the least.

    Args:
        layouts: embed, layers, head and, behind them, unused parameters if there are any.
        plan: says what is on the device already, and what is put off, which is on the host.
        gradient_dtype: dtype of a rounded gradient.
        host_budget: bytes.
    """

    def need(on_disk: frozenset[int]) -> int:
        placed = replace(plan, on_disk=on_disk)
        return memory_need(layouts, placed, gradient_dtype=gradient_dtype).host_total

    tried = [frozenset[int]()]
    for layer in range(plan.num_layers, 0, -1):
        if need(tried[-1]) <= host_budget:
            return tried[-1]
        if layer not in plan.resident | plan.put_off:
            tried.append(tried[-1] | {layer})
    return min(tried, key=need)


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """What a run does with the disk."""

    tier: DiskTier
    nbytes: int
    """Of scratch space."""
    read_bytes: int
    written_bytes: int
    """Of a step."""
    rates: tuple[float, float] | None
    """Bytes read and written in a second, both at once; None if that is not known."""

    def figures(self) -> dict[str, Any]:
        """For the run's record."""
        read_bytes_per_s, write_bytes_per_s = self.rates or (None, None)
        return {
            "path": str(self.tier.path),
            "blocks": sorted(self.tier.blocks),
            "bytes": self.nbytes,
            "read_bytes_per_step": self.read_bytes,
            "written_bytes_per_step": self.written_bytes,
            "read_bytes_per_s": read_bytes_per_s,
            "write_bytes_per_s": write_bytes_per_s,
        }

    def in_words(self) -> str:
        """One line for a person."""
        return (
            f"disk {format_bytes(self.nbytes)} in {self.tier.path}: state of"
            f" {len(self.tier.blocks)} blocks; a step reads {format_bytes(self.read_bytes)} and"
            f" writes {format_bytes(self.written_bytes)} there{self._how_long()}"
        )

    def _how_long(self) -> str:
        if self.rates is None:
            return ""
        read, write = self.rates
        slower = max(self.read_bytes / read, self.written_bytes / write)
        return (
            f", which takes at least {slower:.3g} s at {read / 1e9:.2f} and {write / 1e9:.2f} GB/s"
        )


def disk_use(
    layouts: Sequence[BlockLayout],
    plan: StepPlan,
    tier: DiskTier,
    *,
    gradient_dtype: str,
    rates: tuple[float, float] | None,
) -> DiskUse:
    """Count what a step moves.

    Args:
        layouts: of all blocks.
        plan: with the blocks on the disk.
        tier: the same blocks.
        gradient_dtype: dtype of a rounded gradient.
        rates: bytes read and written in a second, both at once; None: not known.
    """
    plan = replace(plan, pending=True)
    read, written = disk_traffic(build_step(plan), layouts, plan, gradient_dtype)
    return DiskUse(
        tier=tier,
        nbytes=tier.nbytes(layouts),
        read_bytes=read,
        written_bytes=written,
        rates=rates,
    )


def with_disk(rule: PlacementRule, disk: DiskUse) -> PlacementRule:
    """The rule on a machine with this disk; its rates unknown: with one that needs no time."""
    read, write = disk.rates or (math.inf, math.inf)
    rates = replace(rule.footprint.rates, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write)
    return replace(rule, footprint=replace(rule.footprint, rates=rates))


def tier_for(
    layouts: Sequence[BlockLayout],
    plan: StepPlan,
    *,
    gradient_dtype: str,
    host_budget: int,
    path: Path,
    asked: frozenset[int] | None = None,
) -> DiskTier | None:
    """What must live on the disk, beside what is on the device already; None if nothing must.

    Args:
        layouts: of all blocks.
        plan: with its placement on the device.
        gradient_dtype: dtype of a rounded gradient.
        host_budget: bytes.
        path: of the disk.
        asked: the blocks, if they are asked for by name or number.
    """
    blocks = asked
    if blocks is None:
        blocks = blocks_on_disk(
            layouts, plan, gradient_dtype=gradient_dtype, host_budget=host_budget
        )
    waiting = gradient_dtype if plan.clip else None
    return DiskTier(blocks=blocks, path=path, gradient_dtype=waiting) if blocks else None


def check_disk(tier: DiskTier, nbytes: int, *, budget: int, allowed: bool) -> None:
    """Refuse what the disk cannot hold.

    Args:
        tier: of the run.
        nbytes: of scratch space.
        budget: bytes.
        allowed: whether `disk_memory` says so, or that is what is free.

    Raises:
        NoRoomError: naming both.
    """
    if nbytes > budget:
        raise NoRoomError(
            asked=f"{format_enough(nbytes)} on {tier.path}, for the state of"
            f" {len(tier.blocks)} blocks that host memory has no room for",
            found=f"{format_bytes(budget)} {'allowed by disk_memory' if allowed else 'free there'}",
            change="make room, raise disk_memory or host_memory, or choose another disk_path",
        )
