"""Bytes by purpose on the host and on the device, and whether they fit.

The slabs and slots are counted to the byte from the layouts; activations are not counted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain.errors import UserError
from megatrain.layout import BlockLayout, Purpose
from megatrain.units import format_bytes

STATE = (Purpose.WEIGHT, Purpose.RESIDUAL, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)
PROCESS_BYTES = 1_500_000_000
"""Python, torch, transformers and a tokenizer: 0.9 GB measured on the CPU, more with CUDA."""


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
        parts = sorted(self.host.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)


def memory_need(
    layouts: Sequence[BlockLayout],
    *,
    clip: bool,
    gradient_dtype: str,
    layer_weight_slots: int = 2,
    layer_gradient_slots: int = 2,
) -> MemoryNeed:
    """Count a run in which every block's state is on the host.

    Args:
        layouts: embed, layers, head and possibly unused parameters, in block order.
        clip: with clipping every gradient waits on the host, without only a small ring does.
    """
    host = {purpose.value: sum(x.nbytes(purpose) for x in layouts) for purpose in STATE}
    gradients = [layout.nbytes(Purpose.GRADIENT, gradient_dtype) for layout in layouts]
    embed, *layers, head = gradients if len(gradients) > 1 else [*gradients, 0]
    ring = embed + head + layer_gradient_slots * max(layers, default=0)
    host["gradient"] = sum(gradients) if clip else min(ring, sum(gradients))

    def slots(purpose: Purpose, count: int) -> int:
        sizes = [layout.nbytes(purpose, gradient_dtype) for layout in layouts]
        return count * max(sizes[1:-1], default=0) + sizes[0] + sizes[-1]

    device = slots(Purpose.WEIGHT, layer_weight_slots)
    device += slots(Purpose.ACCUMULATOR, layer_gradient_slots)
    device += slots(Purpose.GRADIENT, layer_gradient_slots)
    host["process"] = PROCESS_BYTES
    return MemoryNeed(host=host, device_slots=device)


def available_host_bytes() -> int:
    """What this process can still get: free memory of the machine, or of its control group."""
    available = int(psutil.virtual_memory().available)
    limit, used = (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory.current"),
    )
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    return available


def check_fits(need: MemoryNeed, *, budget: int | None, on_device: bool) -> None:
    """Refuse a run that the host cannot hold.

    Args:
        budget: the user's `host_memory` in bytes; None for what is free.
        on_device: whether slots live on a GPU; on the CPU they take host memory too.

    Raises:
        UserError: naming what is needed by purpose and what there is.
    """
    total = need.host_total + (0 if on_device else need.device_slots)
    have = available_host_bytes() if budget is None else budget
    if total <= have:
        return
    slots = "" if on_device else f", slots {format_bytes(need.device_slots)}"
    source = "is free" if budget is None else "is allowed by host_memory"
    raise UserError(
        asked=f"train with {format_bytes(total)} of host memory ({need.table()}{slots})",
        found=f"{format_bytes(have)} {source}",
        change="choose a smaller model, free memory, freeze blocks, or set max_grad_norm: 0"
        " (gradients then need no room of their own)",
    )
