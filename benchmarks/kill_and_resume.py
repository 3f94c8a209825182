"""Does a run that is killed again and again end where one that is left alone ends?

    python benchmarks/kill_and_resume.py --kills 200 --seed 0

Runs `Trainer` in a process of its own, kills it with SIGKILL at a random moment, half of the time
while a checkpoint is being written, and starts it again with `resume_from_checkpoint: auto`.  After
every kill each directory that has a checkpoint's name is verified, file by file.  When a run has
reached its end, its last checkpoint is compared with that of a run that was never killed, and the
next one begins, until there have been enough kills.  Appends one JSON line to
benchmarks/results/kill_and_resume.jsonl.  The moments follow from the seed as far as a machine's
timing allows.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from megatrain.checkpoint import checkpoints, verify

RESULTS = Path(__file__).parent / "results" / "kill_and_resume.jsonl"
KEYS: dict[str, Any] = {
    "prompt_column": "question",
    "completion_column": "answer",
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "max_length": 64,
    "max_steps": 60,
    "save_steps": 4,
    "save_total_limit": 2,
    "checkpoint_memory": "1MiB",
    "max_shard_size": "2MB",
    "resume_from_checkpoint": "auto",
}
LONGEST_S = 300.0
"""A child that takes longer hangs."""


def run_training(keys: dict[str, Any]) -> None:
    """In a child: train to the end."""
    from megatrain.config import make_config
    from megatrain.trainer import Trainer

    Trainer(make_config(keys)[0], quiet=True).train()


class Campaign:
    """Runs and kills.

    Args:
        folder: with `models/base` and `data/train.jsonl`.
        seed: of the moments.
        changes: to `KEYS`.
    """

    def __init__(self, folder: Path, seed: int, **changes: Any) -> None:
        self.folder, self.random = folder, random.Random(seed)
        places = {
            "model_name_or_path": str(folder / "models/base"),
            "train_files": [str(folder / "data/train.jsonl")],
        }
        self.keys = KEYS | places | changes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["megatrain.trainer", "transformers.models.llama"])
        self.kills = self.in_saves = self.verified = self.finished = 0

    def start(self, output: Path) -> Any:
        """A child that trains into `output`."""
        keys = self.keys | {"output_dir": str(output)}
        child = self._context.Process(target=run_training, args=(keys,))
        child.start()
        return child

    def leave_alone(self) -> float:
        """The run that nobody kills; seconds that it took."""
        began = time.perf_counter()
        child = self.start(self.folder / "whole")
        child.join(LONGEST_S)
        assert child.exitcode == 0, "the uninterrupted run failed"
        return time.perf_counter() - began

    def kill(self, output: Path, longest_s: float) -> bool:
        """Start, kill, verify what is there; whether the run ended before it was killed."""
        child = self.start(output)
        aims = self.random.random() < 0.5
        delay = self.random.random() * (0.02 if aims else longest_s)
        began = time.perf_counter()
        while aims and child.is_alive() and not _is_writing(output):
            time.sleep(0.001)
        left = delay if aims else delay - (time.perf_counter() - began)
        child.join(max(left, 0.0))
        ended = not child.is_alive()
        if not ended:
            os.kill(child.pid, signal.SIGKILL)
            self.kills += 1
            self.in_saves += _is_writing(output)
        child.join(LONGEST_S)
        assert child.exitcode in (0, -signal.SIGKILL), f"a run failed: {child.exitcode}"
        for path in checkpoints(output).values():
            verify(path)
            self.verified += 1
        return ended and child.exitcode == 0

    def run(self, kills: int) -> None:
        """Kill so many times; every run is seen to its end."""
        longest_s = self.leave_alone()
        while self.kills < kills:
            output = self.folder / f"killed-{self.finished}"
            while self.kills < kills and not self.kill(output, longest_s):
                pass
            if not _at_end(output, self.keys["max_steps"]):
                child = self.start(output)
                child.join(LONGEST_S)
                assert child.exitcode == 0, "the last run failed"
            assert last_tensors(output) == last_tensors(self.folder / "whole"), "not the same end"
            self.finished += 1
            shutil.rmtree(output)


def last_tensors(output: Path) -> dict[str, str]:
    """Digests of the weights, residuals and moments of the last checkpoint."""
    last = list(checkpoints(output).values())[-1]
    return {name: r.digest for name, r in verify(last).items() if name.endswith(".safetensors")}


def _is_writing(output: Path) -> bool:
    return any(output.glob(".checkpoint-[1-9]*.writing"))


def _at_end(output: Path, max_steps: int) -> bool:
    return max(checkpoints(output), default=0) == max_steps and (output / "config.json").is_file()


def make_input(folder: Path, hidden_size: int = 128) -> None:
    """A small Llama with a byte tokenizer, and questions with answers."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.tokenizers_for_tests import save_tiny_model

    save_tiny_model(folder / "models/base", hidden_size=hidden_size)
    (folder / "data").mkdir()
    pairs = [{"question": f"{i}+1?", "answer": f" {i + 1}"} for i in range(48)]
    (folder / "data/train.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def main() -> None:
    """Run the campaign, print, record."""
    parser = argparse.ArgumentParser(description="Kill a training again and again.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_input(folder)
        campaign, began = Campaign(folder, arguments.seed), time.perf_counter()
        campaign.run(arguments.kills)
        row = {
            "kills": campaign.kills,
            "kills_while_saving": campaign.in_saves,
            "checkpoints_verified": campaign.verified,
            "runs_finished_and_equal": campaign.finished,
            "seconds": round(time.perf_counter() - began, 1),
            "seed": arguments.seed,
            "steps": campaign.keys["max_steps"],
            "checkpoint_bytes": sum(
                path.stat().st_size
                for path in (folder / "whole").glob("checkpoint-60/**/*")
                if path.is_file()
            ),
            "torch": metadata.version("torch"),
            "cores": os.cpu_count(),
        }
    print(json.dumps(row))
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
