"""What this machine's buses and memories move in a second, measured in a second or two."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.memory import HostSlab
from megatrain.memory.scratch import ScratchFile
from megatrain.optim import AdamWHyper, SegmentBuffers, Updater, host_updater
from megatrain.schedule import Rates

UPDATE_SAMPLE = 2**25
"""Parameters whose update is timed: far more than any cache holds."""
BESIDE_OTHERS = 0.83
"""Share of the update's rate that is left beside copies and launches: 0.75 to 0.94 in four runs of
mixtures on the H200's machine, 4.5 to 5.2 Gparam/s alone (docs/log.md)."""
UPDATES_S = 0.5
"""For so long updates are timed, the second half counts: 35 ms on the H200's machine found 2.4 to
4.6 Gparam/s where 14 runs behind them did 4.2 to 4.6, and two 2.9 and 3.6 (docs/log.md)."""
COPY_BYTES = 2**26
COPIES = 32
DISK_BYTES = 2**28


def measure_rates(device: torch.device, *, host_threads: int | None) -> Rates:
    """Of the host's AdamW, of page-locked copies both ways at once, of the device's memory.

    Args:
        device: a GPU; on the CPU every copy is one in its memory.
        host_threads: of the update; None as in a run.
    """
    updates = host_update_rate(host_threads)
    if device.type == "cuda":
        (h2d, d2h), memory = copy_rates(device), device_rate(device)
    else:
        h2d = d2h = memory = _host_rate()
    return Rates(
        update_params_per_s=updates,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        device_bytes_per_s=memory,
    )


def disk_rates(folder: Path, room: int) -> tuple[float, float]:
    """Bytes a second that are read and written by direct I/O, both at once.

    Args:
        folder: on the disk.
        room: bytes that may be used there for the trial.

    Raises:
        UserError: if the directory cannot be written.
    """
    nbytes = min(DISK_BYTES, HostSlab.rounded(room // 2))
    file = ScratchFile(folder, 2 * nbytes)
    memory = [HostSlab(nbytes, pin=False).take(nbytes).random_() for _ in "ab"]
    file.write([(0, memory[0])])  # what was never written is not read from the disk

    def seconds(call: Callable[[], None]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    with ThreadPoolExecutor(2) as pool:
        calls = (
            partial(file.read, [(0, memory[0])]),
            partial(file.write, [(nbytes, memory[1])]),
        )
        read_s, write_s = pool.map(seconds, calls)
    file.close()
    return nbytes / read_s, nbytes / write_s


def host_update_rate(host_threads: int | None = None) -> float:
    """Parameters a second that AdamW on this host updates in a run."""
    return BESIDE_OTHERS * _update_rate(host_updater(host_threads))


def _host_rate() -> float:
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in "ab")
    target.copy_(source)
    began = time.perf_counter()
    target.copy_(source)
    return 2 * COPY_BYTES / (time.perf_counter() - began)


def copy_rates(device: torch.device, ways: Sequence[str] = ("h2d", "d2h")) -> tuple[float, ...]:
    """Bytes a second of page-locked copies, for each way; several of them at once."""
    slab = HostSlab(len(ways) * COPY_BYTES, pin=True)
    streams = [torch.cuda.Stream(device) for _ in ways]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
    host = [slab.take(COPY_BYTES) for _ in streams]
    there = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in streams]
    pairs = [  # (target, source)
        (gpu, memory) if way == "h2d" else (memory, gpu)
        for way, gpu, memory in zip(ways, there, host, strict=True)
    ]
    torch.cuda.synchronize(device)
    for mark in (0, 1):
        for stream, (target, source), marked in zip(streams, pairs, marks, strict=True):
            with torch.cuda.stream(stream):
                marked[mark].record()
                for _ in range(COPIES if mark == 0 else 0):
                    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    slab.close()
    return tuple(COPIES * COPY_BYTES / (start.elapsed_time(end) / 1e3) for start, end in marks)


def device_rate(device: torch.device) -> float:
    """Bytes read and written."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in "ab")
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    for _ in range(COPIES):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 2 * COPIES * COPY_BYTES / (start.elapsed_time(end) / 1e3)


def _update_rate(updater: Updater) -> float:
    """Parameters a second, in memory like the state's: huge pages, touched by many threads."""
    buffers = _update_sample(UPDATE_SAMPLE)
    hyper = AdamWHyper(
        learning_rate=0.0,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        step=1,
        gradient_scale=1.0,
    )
    times: list[float] = []
    updater(buffers, hyper)  # compiles and starts threads
    while not times or sum(times) < UPDATES_S:
        began = time.perf_counter()
        updater(buffers, hyper)
        times.append(time.perf_counter() - began)
    return UPDATE_SAMPLE / statistics.median(times[len(times) // 2 :])


def _update_sample(size: int) -> SegmentBuffers:
    def take(dtype: torch.dtype) -> Tensor:
        return slab.take(size * dtype.itemsize).view(dtype).zero_()

    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    slab = HostSlab(sum(HostSlab.rounded(size * each.itemsize) for each in dtypes), pin=False)
    weight, residual, exp_avg, exp_avg_sq, gradient = (take(each) for each in dtypes)
    return SegmentBuffers(
        weight=weight,
        residual=residual,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        gradient=gradient,
    )
