"""Does a real fine-tune learn?  Held-out perplexity of SmolLM2 on GSM8K before and after.

    python benchmarks/gsm8k_finetune.py PATH/TO/gsm8k   (after `make demo`)

examples/gsm8k.yaml as it is, but for a few steps and some of the held-out problems, so that two
cores do it in minutes.  Appends one JSON line to benchmarks/results/gsm8k_finetune.jsonl.
"""

import argparse
import json
import math
import platform
import shutil
import tempfile
import time
from pathlib import Path

import torch
import transformers

from megatrain.config import read_config
from megatrain.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gsm8k_finetune.jsonl"
EXAMPLE = ROOT / "examples" / "gsm8k.yaml"


def write_chats(source: Path, target: Path, count: int | None = None) -> Path:
    """Problems as conversations, all or the first `count`."""
    problems = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    chats = [
        [
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": problem["answer"]},
        ]
        for problem in problems
    ]
    target.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return target


def main() -> None:
    """Train, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=32, help="problems")
    parser.add_argument("--picture", type=Path, help="where to keep the run's loss.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changes = {
            "model_name_or_path": ROOT / "runs" / "demo" / "base",
            "train_files": write_chats(args.data / "train.jsonl", folder / "train.jsonl"),
            "eval_files": write_chats(
                args.data / "test.jsonl", folder / "test.jsonl", args.held_out
            ),
            "output_dir": folder / "out",
            "gradient_accumulation_steps": 1,
            "max_steps": args.steps,
            "save_strategy": "no",
        }
        config, _ = read_config(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
        started = time.perf_counter()
        Trainer(config).train()
        seconds = time.perf_counter() - started
        if args.picture is not None:
            shutil.copy(folder / "out" / "loss.png", args.picture)
        logged = [json.loads(line) for line in (folder / "out" / "log.jsonl").open()]
    held_out = [row["eval_loss"] for row in logged if "eval_loss" in row]
    steps = [row for row in logged if "loss" in row]
    row = {
        "what": "SmolLM2-135M-Instruct on GSM8K as chat, examples/gsm8k.yaml cut to a few steps",
        "steps": args.steps,
        "rows_a_step": config.per_device_train_batch_size,
        "learning_rate": config.learning_rate,
        "dtype": config.dtype,
        "tokens": steps[-1]["num_input_tokens_seen"],
        "held_out_problems": args.held_out,
        "eval_loss_before": held_out[0],
        "eval_loss_after": held_out[-1],
        "perplexity_before": math.exp(held_out[0]),
        "perplexity_after": math.exp(held_out[-1]),
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "seconds": seconds,
        "machine": f"{torch.get_num_threads()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(row, indent=1))
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
