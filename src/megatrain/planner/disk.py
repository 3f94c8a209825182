"""Which blocks live on the disk, and what a step reads and writes there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.errors import UserError
from megatrain.layout import BlockLayout
from megatrain.memory import DiskTier
from megatrain.planner.fit import memory_need
from megatrain.schedule import StepPlan, build_step, disk_traffic
from megatrain.units import format_bytes


def blocks_on_disk(
    layouts: Sequence[BlockLayout], plan: StepPlan, *, gradient_dtype: str, host_budget: int
) -> frozenset[int]:
    """As few of the last layers as make the rest fit the host; none if everything does.

    The last, because with clipping their updates are due last: the disk has the time of all layers
    before them.  If nothing makes it fit, what needs the least.

    Args:
        layouts: embed, layers, head and, behind them, unused parameters if there are any.
        plan: says what is on the device already.
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
        if layer not in plan.resident:
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
    read_bytes_per_s: float
    write_bytes_per_s: float
    """Both at once, as measured."""

    def figures(self) -> dict[str, Any]:
        """For the run's record."""
        return {
            "path": str(self.tier.path),
            "blocks": sorted(self.tier.blocks),
            "bytes": self.nbytes,
            "read_bytes_per_step": self.read_bytes,
            "written_bytes_per_step": self.written_bytes,
            "read_bytes_per_s": self.read_bytes_per_s,
            "write_bytes_per_s": self.write_bytes_per_s,
        }

    def in_words(self) -> str:
        """One line for a person."""
        slower = max(
            self.read_bytes / self.read_bytes_per_s, self.written_bytes / self.write_bytes_per_s
        )
        return (
            f"disk {format_bytes(self.nbytes)} in {self.tier.path}: state of"
            f" {len(self.tier.blocks)} blocks; a step reads {format_bytes(self.read_bytes)} and"
            f" writes {format_bytes(self.written_bytes)} there, which"
            f" takes at least {slower:.3g} s at {self.read_bytes_per_s / 1e9:.2f} and"
            f" {self.write_bytes_per_s / 1e9:.2f} GB/s"
        )


def disk_use(
    layouts: Sequence[BlockLayout],
    plan: StepPlan,
    tier: DiskTier,
    *,
    gradient_dtype: str,
    rates: tuple[float, float],
) -> DiskUse:
    """Count what a step moves.

    Args:
        layouts: of all blocks.
        plan: with the blocks on the disk.
        tier: the same blocks.
        gradient_dtype: dtype of a rounded gradient.
        rates: bytes read and written in a second, both at once.
    """
    plan = replace(plan, pending=plan.clip)
    read, written = disk_traffic(build_step(plan), layouts, plan, gradient_dtype)
    return DiskUse(
        tier=tier,
        nbytes=tier.nbytes(layouts),
        read_bytes=read,
        written_bytes=written,
        read_bytes_per_s=rates[0],
        write_bytes_per_s=rates[1],
    )


def check_disk(tier: DiskTier, nbytes: int, *, budget: int, allowed: bool) -> None:
    """Refuse what the disk cannot hold.

    Args:
        tier: of the run.
        nbytes: of scratch space.
        budget: bytes.
        allowed: whether `disk_memory` says so, or that is what is free.

    Raises:
        UserError: naming both.
    """
    if nbytes > budget:
        raise UserError(
            asked=f"{format_bytes(nbytes)} in {tier.path}, for the state of"
            f" {len(tier.blocks)} blocks that host memory has no room for",
            found=f"{format_bytes(budget)} {'allowed by disk_memory' if allowed else 'free there'}",
            change="make room, raise disk_memory or host_memory, or choose another disk_path",
        )
