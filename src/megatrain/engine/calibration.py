"""Measures this machine's rates for `megatrain bench --calibrate`, in less than two minutes.

Every trial is short.  The only ones that could take long are many (shapes of products and
attention), which are left out once `SECONDS` have gone, and those of a slow disk, which is tried
with little first.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch

from megatrain.engine.compute_rates import (
    EXPANSION,
    NUM_ATTENTION,
    NUM_PRODUCTS,
    attention_rates,
    product_rates,
)
from megatrain.engine.device import choose_device
from megatrain.engine.kept_rates import (
    Calibration,
    DiskRates,
    GpuRates,
    check_storable,
    this_machine,
)
from megatrain.engine.rates import DISK_BYTES, copy_rates, device_rate, disk_rates, host_update_rate
from megatrain.memory.scratch import ScratchFile

SECONDS = 60.0
"""After which no further shape is begun."""
DISK_SECONDS = 15.0
"""A disk that would need longer for `DISK_BYTES` is tried with `LITTLE` only."""
LITTLE = 2**24


def calibrate(folder: Path, say: Callable[[str], None]) -> Calibration:
    """Measure; it is for the caller to keep the result.

    Args:
        folder: on the disk to measure.
        say: is told if that is no disk, or has no direct I/O.

    Raises:
        UserError: if the result could not be kept, or the disk has no room.
    """
    machine = this_machine()
    check_storable(machine)
    deadline = time.monotonic() + SECONDS
    device = choose_device("auto")
    read, write = _disk_rates(folder, say)
    return Calibration(
        day=date.today(),
        machine=machine,
        update_params_per_s=host_update_rate(),
        disk=DiskRates(path=str(folder.resolve()), read_bytes_per_s=read, write_bytes_per_s=write),
        gpu=None if device.type == "cpu" else _gpu_rates(device, deadline),
    )


def _gpu_rates(device: torch.device, deadline: float) -> GpuRates:
    h2d, d2h = copy_rates(device)
    return GpuRates(
        h2d_alone_bytes_per_s=copy_rates(device, ("h2d",))[0],
        d2h_alone_bytes_per_s=copy_rates(device, ("d2h",))[0],
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        device_bytes_per_s=device_rate(device),
        products=tuple(product_rates(device, torch.bfloat16, deadline)),
        attention=tuple(attention_rates(device, torch.bfloat16, deadline)),
    )


def _disk_rates(folder: Path, say: Callable[[str], None]) -> tuple[float, float]:
    file = ScratchFile(folder, LITTLE)
    file.close()
    if file.notice:
        say(f"note: {file.notice}")
    rates = disk_rates(folder, 2 * LITTLE)
    seconds = 3 * DISK_BYTES / min(rates)  # written, then read and written
    if seconds > DISK_SECONDS or shutil.disk_usage(folder).free < 4 * DISK_BYTES:
        return rates
    return disk_rates(folder, 2 * DISK_BYTES)


def in_lines(found: Calibration) -> Iterator[str]:
    """One for each rate, and one for what was not measured."""
    rows = list(_rows(found))
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:{width}}  {value:>14}" for name, value in rows)
    if found.gpu is None:
        yield (
            "not measured, as torch finds no GPU: copies to and from it, its memory, matrix"
            " products, attention"
        )
        return
    missing = NUM_PRODUCTS - len(found.gpu.products), NUM_ATTENTION - len(found.gpu.attention)
    if any(missing):
        yield (
            f"not measured, for want of GPU memory or of time: {missing[0]} of {NUM_PRODUCTS}"
            f" products, {missing[1]} of {NUM_ATTENTION} shapes of attention"
        )


def _rows(found: Calibration) -> Iterator[tuple[str, str]]:
    yield "AdamW on the host", f"{found.update_params_per_s / 1e9:.2f} Gparam/s"
    yield "disk read, both at once", f"{found.disk.read_bytes_per_s / 1e9:.2f} GB/s"
    yield "disk write, both at once", f"{found.disk.write_bytes_per_s / 1e9:.2f} GB/s"
    gpu = found.gpu
    if gpu is None:
        return
    for name, rate in (
        ("host to device", gpu.h2d_alone_bytes_per_s),
        ("device to host", gpu.d2h_alone_bytes_per_s),
        ("host to device, both ways at once", gpu.h2d_bytes_per_s),
        ("device to host, both ways at once", gpu.d2h_bytes_per_s),
        ("device memory, read and written", gpu.device_bytes_per_s),
    ):
        yield name, f"{rate / 1e9:.1f} GB/s"
    for product in gpu.products:
        name = f"product of {product.tokens} x {product.width} x {EXPANSION * product.width}"
        yield name, f"{product.flops_per_s / 1e12:.1f} TFLOPS"
    for each in gpu.attention:
        name = f"attention, {each.length} tokens, head of {each.head_dim}"
        yield name, f"{each.forward_flops_per_s / 1e12:.1f} TFLOPS"
        yield f"{name}, backward", f"{each.backward_flops_per_s / 1e12:.1f} TFLOPS"
