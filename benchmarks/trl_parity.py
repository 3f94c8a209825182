"""The same fine-tune in TRL's SFTTrainer and here: supervised tokens and losses, SmolLM2 on GSM8K.

    pip install trl            (in an environment of its own, beside this project's requirements)
    python benchmarks/trl_parity.py PATH/TO/gsm8k/train.jsonl   (after `make demo`)

One mapping of options goes to both, fp32 on the CPU, rows in the order of the file.  Compared are

- supervised tokens, sample by sample: `messages` here, prompt and completion as messages in TRL,
  whose `assistant_only_loss` does not know SmolLM2's template; and conversations of two problems,
  here with the stock template, in TRL with the same marked with `{% generation %}` by hand;
- losses and gradient norms (before clipping), step by step;
- one step of 16 rows as 16x1 and as 2x8, in both: rows differ in length, so a mean of means shows.

With `--packing` the first 16 problems are packed into rows of 512 tokens (TRL's padding-free
best-fit), all of them in each of six steps (the first changes nothing: warm-up begins at 0),
because the order of packed rows is not the same.

Appends one JSON line to benchmarks/results/trl_parity.jsonl.
"""

import argparse
import itertools
import json
import platform
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from megatrain.config import TrainConfig
from megatrain.data import DataOptions, load_rows, load_tokenizer
from megatrain.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "trl_parity.jsonl"
MODEL = ROOT / "runs" / "demo" / "base"
UNSUPERVISED = -100
SHORT = 500
"""Characters of a problem's line: most fit into `--max-length`, some are cut."""
OPTIONS = {
    "learning_rate": 2e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 42,
}
Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What both are asked for."""

    model: Path
    conversations: Sequence[Messages]
    """Each a question and its answer."""
    max_length: int
    """Tokens a row."""
    batch: int
    """Rows a micro-batch."""
    accumulation: int
    steps: int
    packing: bool = False

    def options(self, folder: Path) -> dict[str, Any]:
        """Keys that both know by the same name."""
        return OPTIONS | {
            "output_dir": str(folder / "out"),
            "max_length": self.max_length,
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "max_steps": self.steps,
            "packing": self.packing,
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one of them did."""

    targets: list[list[int]]
    """The supervised token ids of each sample."""
    losses: list[float]
    grad_norms: list[float]


def megatrain_run(run: Run) -> Outcome:
    """This trainer, from a file of messages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_messages(folder / "train.jsonl", run.conversations)
        config = TrainConfig(
            **run.options(folder),
            model_name_or_path=str(run.model),
            train_files=[str(data)],
            dtype="float32",
            device="cpu",
            shuffle=False,
        )
        Trainer(config).train()
        logged = [json.loads(line) for line in (folder / "out" / "log.jsonl").open()]
        return Outcome(
            targets=megatrain_targets(run.model, data, run.max_length),
            losses=[row["loss"] for row in logged if "loss" in row],
            grad_norms=[row["grad_norm"] for row in logged if "grad_norm" in row],
        )


def trl_run(run: Run) -> Outcome:
    """TRL, from prompt and completion as messages."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as name:
        trainer = SFTTrainer(
            model=str(run.model),
            args=SFTConfig(**run.options(Path(name)), **TRL_ONLY),
            train_dataset=Dataset.from_list(
                [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in run.conversations]
            ),
        )
        trainer.train()
        logged = trainer.state.log_history
        return Outcome(
            targets=trl_targets(trainer),
            losses=[row["loss"] for row in logged if "loss" in row],
            grad_norms=[float(row["grad_norm"]) for row in logged if "grad_norm" in row],
        )


TRL_ONLY = {
    "bf16": False,
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "model_init_kwargs": {"dtype": "float32"},
    "report_to": "none",
    "disable_tqdm": True,
}


def megatrain_targets(model: Path, data: Path, max_length: int) -> list[list[int]]:
    """Token ids with a weight; the first token is never a target."""
    rows = load_rows(data, load_tokenizer(model), DataOptions(max_length=max_length))
    return [row.input_ids[1:][row.weights[1:] > 0].tolist() for row in rows]


def trl_targets(trainer: Any) -> list[list[int]]:
    """Labels that are not left out, of each sample of each row."""
    rows = trainer.train_dataset
    lengths = rows["seq_lengths"] if "seq_lengths" in rows.column_names else None
    samples: list[list[int]] = []
    for number, labels in enumerate(rows["labels"]):
        stops = itertools.accumulate(lengths[number] if lengths else [len(labels)], initial=0)
        samples += [labels[start + 1 : stop] for start, stop in itertools.pairwise(stops)]
    return [[label for label in sample if label != UNSUPERVISED] for sample in samples]


def several_turns(model: Path, conversations: Sequence[Messages]) -> tuple[list[list[int]], ...]:
    """Targets of conversations of two problems each, here and in TRL with a template by hand."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    pairs = [
        [*first, *second]
        for first, second in zip(conversations[::2], conversations[1::2], strict=True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = marked(tokenizer.chat_template)
    with tempfile.TemporaryDirectory() as name:
        data = write_messages(Path(name) / "train.jsonl", pairs)
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            args=SFTConfig(
                output_dir=name,
                assistant_only_loss=True,
                max_length=2048,
                **{key: value for key, value in TRL_ONLY.items() if key != "model_init_kwargs"},
            ),
            train_dataset=Dataset.from_list([{"messages": chat} for chat in pairs]),
            processing_class=tokenizer,
        )
        return megatrain_targets(model, data, 2048), trl_targets(trainer)


def marked(template: str) -> str:
    """A ChatML template with the assistant's part of each turn marked."""
    turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    assert turn in template
    begin = "{{'<|im_start|>' + message['role'] + '\n'}}"
    said = "{{message['content'] + '<|im_end|>' + '\n'}}"
    assistant = "{% generation %}" + said + "{% endgeneration %}"
    chosen = "{% if message['role'] == 'assistant' %}" + assistant + "{% else %}" + said
    return template.replace(turn, begin + chosen + "{% endif %}")


def write_messages(path: Path, conversations: Sequence[Messages]) -> Path:
    """A file of `messages`, one conversation a line."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations))
    return path


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Relative to theirs."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def in_both(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    """Samples whose targets are those of a sample of the other."""
    return (Counter(map(tuple, ours)) & Counter(map(tuple, theirs))).total()


def compared(ours: Outcome, theirs: Outcome) -> dict[str, Any]:
    """Figures of the same run in both."""
    return {
        "samples": len(ours.targets),
        "supervised_tokens": sum(map(len, ours.targets)),
        "supervised_tokens_trl": sum(map(len, theirs.targets)),
        "samples_with_the_same_supervised_tokens": in_both(ours.targets, theirs.targets),
        "largest_relative_difference_loss": largest_difference(ours.losses, theirs.losses),
        "largest_relative_difference_grad_norm": largest_difference(
            ours.grad_norms, theirs.grad_norms
        ),
        "losses": ours.losses,
        "losses_trl": theirs.losses,
        "grad_norms": ours.grad_norms,
        "grad_norms_trl": theirs.grad_norms,
    }


def scaling(model: Path, conversations: Sequence[Messages], max_length: int) -> dict[str, Any]:
    """Loss and gradient norm of one step as 16x1 and as 2x8."""
    found: dict[str, Any] = {}
    for name, train in (("megatrain", megatrain_run), ("trl", trl_run)):
        for batch in (1, 8):
            run = Run(
                model=model,
                conversations=conversations,
                max_length=max_length,
                batch=batch,
                accumulation=len(conversations) // batch,
                steps=1,
            )
            outcome = train(run)
            split = f"{run.accumulation}x{run.batch}"
            found[f"{name} {split}"] = {
                "loss": outcome.losses[0],
                "grad_norm": outcome.grad_norms[0],
            }
    return found


def gsm8k(path: Path, count: int) -> list[Messages]:
    """The first short problems as conversations."""
    with path.open() as file:
        short = (line for line in file if len(line) < SHORT)
        problems = [json.loads(line) for line in itertools.islice(short, count)]
    return [
        [
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": problem["answer"]},
        ]
        for problem in problems
    ]


def unpacked(args: argparse.Namespace) -> dict[str, Any]:
    """Rows one by one: the run, conversations of several turns, splits of one step."""
    run = Run(
        model=args.model,
        conversations=gsm8k(args.data, args.steps * args.rows),
        max_length=args.max_length,
        batch=args.rows,
        accumulation=1,
        steps=args.steps,
    )
    ours, theirs = several_turns(args.model, run.conversations)
    return {
        "steps": args.steps,
        "rows_a_step": args.rows,
        "max_length": args.max_length,
        **compared(megatrain_run(run), trl_run(run)),
        "conversations_of_two_problems": len(ours),
        "of_these_with_the_same_supervised_tokens": in_both(ours, theirs),
        "one_step_of_16_rows": scaling(args.model, run.conversations[:16], args.max_length),
    }


def packed(model: Path, data: Path) -> dict[str, Any]:
    """All samples in each step."""
    run = Run(
        model=model,
        conversations=gsm8k(data, 16),
        max_length=512,
        batch=16,
        accumulation=1,
        steps=6,
        packing=True,
    )
    return {"steps": run.steps, "max_length": run.max_length} | compared(
        megatrain_run(run), trl_run(run)
    )


def main() -> None:
    """Run both, compare, record."""
    import trl

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=160)
    parser.add_argument("--packing", action="store_true")
    args = parser.parse_args()
    found = packed(args.model, args.data) if args.packing else unpacked(args)
    row = {
        "what": "SmolLM2-135M-Instruct on GSM8K messages, fp32, here and in TRL's SFTTrainer",
        "packing": args.packing,
        **found,
        "machine": f"{torch.get_num_threads()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    print(json.dumps(row, indent=1))
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
