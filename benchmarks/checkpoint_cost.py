"""What does a checkpoint cost a run: memory, time in which training waits, time to go on from it?

    python benchmarks/checkpoint_cost.py configs/shapes/llama-50m --steps 12 --save-steps 4

Trains a shape with random weights on random text, with asynchronous checkpoints, then goes on from
the last one in a process of its own (`--no-resume`: not that).  Appends one JSON line to
benchmarks/results/checkpoint_cost.jsonl: for each checkpoint its bytes and seconds, for how long
training waited and for how long it was expected to; seconds until all is checked (of a checkpoint
every digest) and until it is loaded; tokens a second; private memory and files of this process
before the steps, and the peak of its private memory during saves and while a checkpoint is loaded.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results" / "checkpoint_cost.jsonl"


class PrivateMemory:
    """The peak of this process's anonymous memory, sampled every 5 ms."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) * 1024

    def reset(self) -> int:
        self.peak = self.now()
        return self.peak

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.005)


def make_folder(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The shape with a byte tokenizer, random text, and the config of the run."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.tokenizers_for_tests import byte_tokenizer

    shutil.copytree(arguments.shape, folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = max(arguments.steps * arguments.rows // 2, arguments.rows)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(rows):
            letters = draw.choices("abcdefghijklmnopqrstuvwxyz ", k=arguments.length - 1)
            file.write(json.dumps({"text": "".join(letters)}) + "\n")
    keys = {
        "model_name_or_path": str(folder / "model"),
        "model_init": "random",
        "train_files": [str(folder / "data.jsonl")],
        "output_dir": str(arguments.output or folder / "out"),
        "overwrite_output_dir": True,
        "max_length": arguments.length,
        "per_device_train_batch_size": arguments.micro_rows,
        "gradient_accumulation_steps": arguments.rows // arguments.micro_rows,
        "max_steps": arguments.steps,
        "save_steps": arguments.steps if arguments.save_once else arguments.save_steps,
        "save_total_limit": 1,
        "max_grad_norm": arguments.max_grad_norm,
        "lr_scheduler_type": "constant",
        "save_only_model": False,
    }
    for name in ("checkpoint_memory", "gpu_memory", "host_memory"):
        if value := getattr(arguments, name):
            keys[name] = value
    return keys


def train(keys: dict[str, Any], save_once: int | None = None) -> dict[str, Any]:
    """Figures of one run.

    With `save_once` a checkpoint after that step is measured; the disk may have no room for another
    one beside it at the end.
    """
    from transformers import TrainerCallback, TrainerControl, TrainerState

    from megatrain.config import make_config
    from megatrain.errors import UserError
    from megatrain.trainer import Trainer
    from megatrain.trainer.loop import Loop

    class SaveOnce(TrainerCallback):
        def on_step_end(
            self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
        ) -> None:
            control.should_save = control.should_save or state.global_step == save_once

    memory, seen = PrivateMemory(), dict[str, Any]()
    began = time.perf_counter()
    trainer = Trainer(make_config(keys)[0], callbacks=[SaveOnce])
    seen["prepare_s"] = time.perf_counter() - began  # data and model; of a checkpoint every digest
    load, steps = trainer._load_weights, Loop.steps

    def measured_load(*parts: Any) -> Any:
        before, began = memory.reset(), time.perf_counter()
        store = load(*parts)
        seen["load_s"] = time.perf_counter() - began
        seen["load_peak_bytes"] = memory.peak - before
        seen["state_bytes"] = store.slab.nbytes
        return store

    def measured_steps(loop: Loop) -> None:
        before = memory.reset()
        seen["files_in_memory_bytes"] = psutil.Process().memory_info().shared
        seen["private_before_steps_bytes"] = before
        steps(loop)
        seen["loop_peak_bytes"] = memory.peak - before

    trainer._load_weights = measured_load  # type: ignore[method-assign]
    Loop.steps = measured_steps  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        trainer.train()
    except UserError as error:
        if save_once is None or "checkpoint" not in str(error):
            raise
    seen["train_s"] = time.perf_counter() - began
    seen["checkpoint_memory_bytes"] = trainer.run.memory.checkpoint
    seen["params"] = trainer.model.num_params
    lines = (Path(keys["output_dir"]) / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    seen["saves"] = [row for row in rows if "checkpoint_seconds" in row]
    seen["tokens_per_second"] = [r["tokens_per_second"] for r in rows if "tokens_per_second" in r]
    return seen


def go_on(arguments: argparse.Namespace, keys: dict[str, Any]) -> dict[str, Any]:
    """Figures of one more step from the last checkpoint, in a process of its own."""
    more = keys | {"max_steps": arguments.steps + 1, "resume_from_checkpoint": "auto"}
    command = [sys.executable, __file__, str(arguments.shape), "--resume-with", json.dumps(more)]
    done = subprocess.run(command, capture_output=True, text=True)
    resumed = [line for line in done.stdout.splitlines() if line.startswith("RESUMED ")]
    if not resumed:
        sys.exit(done.stdout + done.stderr)
    return dict(json.loads(resumed[0].removeprefix("RESUMED ")))


def main() -> None:
    """Train and save, then load in another process; print, record."""
    parser = argparse.ArgumentParser(description="Measure what checkpoints cost.")
    parser.add_argument("shape", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--save-once", type=int, help="A step; then no regular ones.")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--checkpoint-memory")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--output", type=Path, help="Directory of the run.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--resume-with", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resume_with:
        print("RESUMED " + json.dumps(train(json.loads(arguments.resume_with))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        keys = make_folder(arguments, Path(scratch))
        row: dict[str, Any] = {"shape": str(arguments.shape)} | train(keys, arguments.save_once)
        if arguments.resume:
            row["resumed"] = go_on(arguments, keys)
    row |= {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps(row, indent=1))
    with arguments.results.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
