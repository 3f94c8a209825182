"""Bytes by purpose on the host and on the device, and whether they fit.

The slabs and slots are counted to the byte from the layouts; activations are not counted here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.errors import NoRoomError
from megatrain.layout import STATE, BlockLayout, Purpose
from megatrain.memory import HostSlab
from megatrain.planner.host import host_memory
from megatrain.schedule import StepPlan, slot_sizes
from megatrain.units import format_bytes, format_enough

PROCESS_BYTES = 2_000_000_000
"""Python, torch, transformers, a tokenizer, CUDA and what is compiled: 2.0 to 2.4 GB on an H200 (a
third of it files), 0.9 GB on the CPU."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Host bytes by purpose, and the device slots' bytes."""

    host: dict[str, int]
    device_slots: int
    """Weight slots, gradient sums and stagings."""

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    def table(self) -> str:
        """The host's purposes in one line, largest first."""
        return by_purpose(self.host)


def by_purpose(purposes: Mapping[str, int]) -> str:
    """Bytes by purpose in one line, largest first."""
    parts = sorted(purposes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)


def memory_need(
    layouts: Sequence[BlockLayout],
    plan: StepPlan,
    *,
    gradient_dtype: str,
) -> MemoryNeed:
    """Count what a run has on the host, and its slots on the device, to the byte.

    Args:
        layouts: embed, layers, head and, behind them, unused parameters if there are any.
        plan: gradients whose update is deferred wait on the host, others pass through a ring; what
            is resident or on the disk is not on the host.
        gradient_dtype: dtype of a rounded gradient.
    """
    elsewhere = plan.resident | plan.on_disk
    on_host = [layout for block, layout in enumerate(layouts) if block not in elsewhere]
    host = {
        purpose.value: sum(HostSlab.rounded(layout.nbytes(purpose)) for layout in on_host)
        for purpose in STATE
    }
    sizes = slot_sizes(layouts[: plan.head + 1], plan, gradient_dtype)
    host["gradient"] = sum(map(HostSlab.rounded, sizes.home_gradients.values()))
    host["activation"] = sum(map(HostSlab.rounded, sizes.host_inputs.values()))
    if plan.on_disk:
        host["disk slots"] = sum(sizes.loaded)
        # Read one purpose after the other, for checkpoints; the one before may not be gone yet.
        host["disk copies"] = 2 * max(layouts[b].nbytes(Purpose.EXP_AVG) for b in plan.on_disk)
    host["process"] = PROCESS_BYTES
    return MemoryNeed(host=host, device_slots=sizes.device)


def check_fits(
    need: MemoryNeed,
    *,
    budget: int | None,
    device_free: int | None,
    elsewhere: int = 0,
    to: str = "train",
) -> None:
    """Refuse a run that the host cannot hold, or whose slots the GPU cannot.

    Args:
        budget: the user's `host_memory` in bytes; None for what is free.
        device_free: free bytes of the GPU; None on the CPU, where slots take host memory too.
        elsewhere: bytes of the host's need that may yet be put on the GPU or the disk.
        to: what the memory is for, in words.

    Raises:
        NoRoomError: naming what is needed by purpose and what there is.
    """
    if device_free is not None and need.device_slots > device_free:
        raise NoRoomError(
            asked=f"{to} with {format_enough(need.device_slots)} of slots on the GPU, before"
            " activations",
            found=f"{format_bytes(device_free)} free there",
            change="free GPU memory, or choose a model with smaller layers, embedding or head",
        )
    has_gpu = device_free is not None
    total = need.host_total + (0 if has_gpu else need.device_slots)
    free = host_memory()
    have = free.nbytes if budget is None else budget
    if total <= have + elsewhere:
        return
    slots = "" if has_gpu else f", slots {format_bytes(need.device_slots)}"
    source = free.in_words() if budget is None else "is allowed by host_memory"
    pool = "give checkpoint_memory less, " if need.host.get("checkpoint") else ""
    raise NoRoomError(
        asked=f"{to} with {format_enough(total)} of host memory ({need.table()}{slots})",
        found=f"{format_bytes(have)} {source}",
        change="choose a smaller model, or free memory"
        if not need.host.get("gradient")
        else f"{pool}choose a smaller model, free memory, freeze blocks, let layers live on a disk"
        " (disk_path), or set max_grad_norm: 0 (few gradients then wait on the host)",
    )
