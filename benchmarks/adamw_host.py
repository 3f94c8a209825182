"""How near is the host's AdamW sweep to what memory bandwidth allows?

    python benchmarks/adamw_host.py

Floor: 26 bytes a parameter (weight 2+2, residual 2+2, moments 8+8, gradient 2) over the rate at
which torch adds a number to a large tensor in place, which like the sweep reads and writes the same
lines.  Appends one JSON line to benchmarks/results/adamw_host.jsonl.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from megatrain.masters import split_master
from megatrain.optim import AdamWHyper, SegmentBuffers, host_updater

RESULTS = Path(__file__).parent / "results" / "adamw_host.jsonl"
SIZE = 40_000_000
BYTES_PER_PARAMETER = 26


def seconds(action: Callable[[], object], repeats: int = 9) -> list[float]:
    """Sorted times after one warm-up."""
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return sorted(times)


def cpu_name() -> str:
    """The processor's own name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str | None:
    """The checkout's commit, marked if files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or None


def main() -> None:
    """Measure bandwidth and sweep, print, record."""
    threads = os.cpu_count() or 1
    target = torch.zeros(4 * SIZE)
    bandwidth = 8 * target.numel() / statistics.median(seconds(lambda: target.add_(1.0)))
    weight, residual = split_master(torch.randn(SIZE) * 0.02)
    buffers = SegmentBuffers(
        weight=weight,
        residual=residual,
        exp_avg=torch.zeros(SIZE),
        exp_avg_sq=torch.zeros(SIZE),
        gradient=torch.randn(SIZE).bfloat16(),
    )
    hyper = AdamWHyper(
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=1,
        gradient_scale=1.0,
    )
    update = host_updater(threads)
    times = seconds(lambda: update(buffers, hyper))
    rates = [SIZE / t / 1e9 for t in times]
    row = {
        "what": "host AdamW sweep, bf16 weight + int16 residual, bf16 gradient",
        "unit": "Gparam/s",
        "p50": statistics.median(rates),
        "p20": rates[int(0.8 * len(rates))],
        "p80": rates[int(0.2 * len(rates))],
        "predicted_at_this_bandwidth": bandwidth / BYTES_PER_PARAMETER / 1e9,
        "bytes_per_second_in_place": bandwidth,
        "threads": threads,
        "machine": cpu_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numba": metadata.version("numba"),
        },
        "commit": commit(),
    }
    print(json.dumps(row, indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
