"""Step by step the losses of plain transformers + torch AdamW: SmolLM2 on GSM8K, fp32, on the CPU.

    python benchmarks/gsm8k_parity.py PATH/TO/gsm8k/train.jsonl   (after `make demo`)

The question is the prompt, the answer the completion.  Both runs see the same rows in the same
micro-batches.  Appends one JSON line to benchmarks/results/gsm8k_parity.jsonl.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from megatrain.data import DataOptions, StepSampler, load_rows, load_tokenizer
from megatrain.engine import Engine, EngineOptions
from megatrain.engine.microbatch import make_micro_batch, split_rows
from megatrain.engine.options import AdamWOptions
from megatrain.memory import BlockStore
from megatrain.models.hub import find_model
from megatrain.models.load import load_blocks
from megatrain.models.weights import LoadReport

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gsm8k_parity.jsonl"
MODEL = ROOT / "runs" / "demo" / "base"
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM, ROWS, MICRO_ROWS = 2e-5, 0.01, 1.0, 2, 1
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def streamed(steps: list[list[Any]]) -> list[float]:
    """Losses of this engine."""
    blocks = load_blocks(find_model(str(MODEL)), compute_dtype="float32")
    model = blocks.model
    layouts = [block.layout for block in model.blocks]
    store = BlockStore.filled(layouts, blocks.weights(LoadReport()), device=torch.device("cpu"))
    options = EngineOptions(
        adamw=AdamWOptions(weight_decay=WEIGHT_DECAY),
        max_grad_norm=MAX_GRAD_NORM,
        micro_batch_rows=MICRO_ROWS,
    )
    engine = Engine(model, store, options, device=torch.device("cpu"))
    return [engine.step(rows, learning_rate=LEARNING_RATE).loss for rows in steps]


def plain(steps: list[list[Any]]) -> list[float]:
    """Losses of transformers and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n in decayed], "weight_decay": WEIGHT_DECAY},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
    )
    losses = []
    for rows in steps:
        total, loss_sum = sum(float(row.weights[1:].sum()) for row in rows), 0.0
        optimizer.zero_grad()
        for group in split_rows(rows, rows_per_micro=MICRO_ROWS, tokens_per_micro=None):
            batch = make_micro_batch(group, 0, torch.device("cpu"))
            logits = model(input_ids=batch.ids_BT, use_cache=False).logits
            each = F.cross_entropy(
                logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="none"
            )
            loss = (each * batch.weights_BT.flatten()).sum()
            (loss / total).backward()
            loss_sum += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        losses.append(loss_sum / total)
    return losses


def main() -> None:
    """Run both, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    options = DataOptions(max_length=512, prompt_column="question", completion_column="answer")
    rows = load_rows([args.data], load_tokenizer(MODEL), options)
    sampler = StepSampler(len(rows), ROWS, seed=42, shuffle=True)
    steps = [[rows[i] for i in sampler.row_indices(step)] for step in range(args.steps)]
    tokens = sum(len(row.input_ids) for step in steps for row in step)
    started = time.perf_counter()
    mine = streamed(steps)
    middle = time.perf_counter()
    theirs = plain(steps)
    ended = time.perf_counter()
    row = {
        "what": "SmolLM2-135M-Instruct on GSM8K, fp32, losses step by step",
        "steps": args.steps,
        "tokens": tokens,
        "largest_relative_difference": max(
            abs(a - b) / b for a, b in zip(mine, theirs, strict=True)
        ),
        "first_loss": mine[0],
        "last_loss": mine[-1],
        "tokens_per_second": tokens / (middle - started),
        "tokens_per_second_plain": tokens / (ended - middle),
        "losses": mine,
        "losses_plain": theirs,
        "machine": f"{torch.get_num_threads()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(row, indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
