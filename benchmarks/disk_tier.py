"""How fast are the disk's lanes, and what does a step cost whose layers live on the disk?

    python benchmarks/disk_tier.py --disk-path DIRECTORY --shape configs/shapes/smollm2-135m

First the disk: one request at a time, as `dd bs=4M oflag=direct` does it, then scratch space with
several in flight, each way alone and both at once.  Then training steps of a shape with random
weights and tokens on the CPU, in turn with everything in memory and with every layer on the disk.
Appends one JSON line to benchmarks/results/disk_tier.jsonl.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.memory import BlockStore, DiskTier, HostSlab
from megatrain.memory.scratch import PIECE_BYTES, ScratchFile
from megatrain.models import build_on_meta, read_config, split_model
from megatrain.models.initialise import init_block_weights
from megatrain.planner import disk_use
from megatrain.schedule import Span, occupancy

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.adamw_host import commit, cpu_name

RESULTS = Path(__file__).parent / "results" / "disk_tier.jsonl"
NBYTES = 2**30
REPEATS = 5


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def disk_rates(folder: Path) -> dict[str, float]:
    """GB/s, medians; every way in turn, so that a disk whose rate drifts is the same for all."""
    memory = [HostSlab(NBYTES, pin=False).take(NBYTES).random_() for _ in "ab"]
    file = ScratchFile(folder, 2 * NBYTES)
    file.write([(0, memory[0]), (NBYTES, memory[1])])  # blocks of the file system are written once
    with tempfile.NamedTemporaryFile(dir=folder) as plain:
        os.posix_fallocate(plain.fileno(), 0, NBYTES)
        one = os.open(plain.name, os.O_RDWR | os.O_DIRECT)
        pieces = memory[0].view(-1, PIECE_BYTES).numpy()

        def one_by_one(call: Callable[[int, list[Any], int], int]) -> None:
            for index, piece in enumerate(pieces):
                assert call(one, [piece], index * PIECE_BYTES) == PIECE_BYTES

        def both() -> None:
            with ThreadPoolExecutor(2) as pool:
                for done in (
                    pool.submit(file.read, [(0, memory[0])]),
                    pool.submit(file.write, [(NBYTES, memory[1])]),
                ):
                    done.result()

        one_by_one(os.pwritev)
        ways = {
            "one_request_write": lambda: one_by_one(os.pwritev),
            "one_request_read": lambda: one_by_one(os.preadv),
            "lane_write": lambda: file.write([(0, memory[0])]),
            "lane_read": lambda: file.read([(0, memory[0])]),
            "lanes_both_each": both,
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, call in ways.items():
                taken[name].append(seconds(call))
        os.close(one)
    file.close()
    return {name: round(NBYTES / statistics.median(s) / 1e9, 3) for name, s in taken.items()}


def steps(arguments: argparse.Namespace, *, on_disk: bool, clip: float) -> dict[str, Any]:
    """Seconds of each step after the first two, lanes, losses, and bytes moved."""
    config = read_config(Path(arguments.shape))
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    layouts = [block.layout for block in model.blocks]
    tier = DiskTier(
        blocks=frozenset(range(1, model.num_layers + 1)),
        path=arguments.disk_path,
        gradient_dtype="float32" if clip else None,
    )
    store = BlockStore.filled(
        layouts,
        init_block_weights(model, seed=0),
        device=torch.device("cpu"),
        disk=tier if on_disk else None,
    )
    options = EngineOptions(
        max_grad_norm=clip,
        micro_batch_rows=arguments.micro_rows,
        disk_slots=arguments.disk_slots,
        threads=True,
    )
    engine = Engine(model, store, options, device=torch.device("cpu"))
    draw = np.random.default_rng(0)
    taken, losses, spans = [], [], list[Span]()
    for step in range(2 + arguments.steps):
        ids = draw.integers(0, model.vocab_size, (arguments.rows, arguments.length))
        rows = [Row(input_ids=each, weights=np.ones(len(each), np.float32)) for each in ids]
        engine.spans = spans if step == 1 + arguments.steps else None
        began = time.perf_counter()
        losses.append(engine.step(rows, learning_rate=1e-4).loss)
        taken.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "seconds": [round(each, 3) for each in taken[2:]],
        "lanes_busy": {lane.value: round(share, 3) for lane, share in occupancy(spans).items()},
        "losses": losses,
    }
    if on_disk:
        plan = replace(engine.plan, num_micro=arguments.rows // arguments.micro_rows)
        use = disk_use(layouts, plan, tier, gradient_dtype="float32", rates=(1.0, 1.0))
        found |= {"bytes_read": use.read_bytes, "bytes_written": use.written_bytes}
        found["scratch_bytes"] = use.nbytes
    engine.close()
    store.close()
    return found


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--disk-path", type=Path, required=True)
    parser.add_argument("--shape", default="configs/shapes/smollm2-135m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--micro-rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--disk-slots", type=int, default=3)
    arguments = parser.parse_args()
    row: dict[str, Any] = {
        "what": "disk tier: rates of direct I/O, steps with all layers on the disk, fp32",
        "gigabytes_per_s": disk_rates(arguments.disk_path),
        **{k: v for k, v in vars(arguments).items() if k != "disk_path"},
    }
    for clip in (1.0, 0.0):
        name = "clip" if clip else "no_clip"
        in_memory = steps(arguments, on_disk=False, clip=clip)
        on_disk = steps(arguments, on_disk=True, clip=clip)
        assert in_memory.pop("losses") == on_disk.pop("losses"), "a placement changed a result"
        row[name] = {"memory": in_memory, "disk": on_disk}
    row |= {
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }
    print(json.dumps(row, indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as results:
        results.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
