"""Rows and arguments that a program holds, as files and keys.

Promise: what is trained on is a file in the output directory, named by its content, so that the run
can be resumed, and repeated from the command line.  Price: a copy of the rows on the disk.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import TrainingArguments

from megatrain.config import TrainConfig, make_config
from megatrain.errors import UserError
from megatrain.preflight import check_output, claim_output, find_gguf

FOLDER = "records"
ON_THIS_MACHINE = ("use_cpu", "bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval")
"""What transformers checks against the hardware when arguments are made."""
SET_BY_THEMSELVES = ("do_eval", "gradient_checkpointing")
"""By eval_strategy, and beside activation_checkpointing."""
OF_THEIR_TRAINERS = {
    "processing_class": "the model's own tokenizer is used; tokenizer_name names another",
    "tokenizer": "the model's own is used; tokenizer_name names another",
    "data_collator": "rows are padded here; input_ids and labels of your own are a format",
    "formatting_func": "format the rows before you give them",
    "compute_metrics": "evaluation takes the loss; on_evaluate of a callback sees it",
    "compute_loss_func": "give loss=, of hidden states and head",
    "preprocess_logits_for_metrics": "evaluation takes the loss; logits are never whole",
    "optimizers": "the optimizer is AdamW with fp32 state; adam_ and lr_scheduler keys set it",
    "optimizer_cls_and_kwargs": "the optimizer is AdamW with fp32 state, set by the adam_ keys",
    "peft_config": "all parameters are trained; trainable and frozen say which",
    "quantization_config": "training is at full precision",
}
"""Arguments of transformers' Trainer and TRL's SFTTrainer, and what is here instead."""
Records = Iterable[Mapping[str, Any]]


def config_of(
    model: TrainConfig | str | Path,
    args: Any,
    train_dataset: Records | None,
    eval_dataset: Records | None,
    keys: Mapping[str, Any],
) -> tuple[TrainConfig, list[str]]:
    """A config whose files are these rows, and notices about its keys.

    Args:
        model: directory or id; or a config, which says everything.
        args: TrainingArguments, a class derived from it such as TRL's SFTConfig, a mapping of keys,
            or None.
        train_dataset: rows as dictionaries.
        eval_dataset: the same, held out.
        keys: of the config, over those in args.

    Raises:
        UserError: for a key or a row that makes no sense.
    """
    if isinstance(model, TrainConfig):
        if args is not None or train_dataset is not None or eval_dataset is not None or keys:
            raise UserError(
                asked="a TrainConfig, and arguments or rows beside it",
                found="two places for the same things",
                change="put all of it into the config, or give the model's directory first",
            )
        return model, []
    if not isinstance(model, str | Path):
        raise UserError(
            asked=f"a {type(model).__name__} as the model",
            found="a model that is in memory already",
            change="give its directory or its id: blocks are read one by one; or a TrainConfig",
        )
    named = _keys_of(args) | _known(keys) | {"model_name_or_path": str(model)}
    for name in ("train_files", "eval_files"):
        if name in named:
            raise UserError(asked=name, found="rows that are given too", change="give one of them")
    # With a file in its place: every key is checked before anything is written.
    checked, _ = make_config(named | _files("", "" if eval_dataset is not None else None))
    train_records = _some(train_dataset, "train_dataset")
    eval_records = None if eval_dataset is None else _some(eval_dataset, "eval_dataset")
    folder, _ = find_gguf(checked.model_name_or_path, checked.gguf_file)
    output = Path(checked.output_dir)
    check_output(output, model=Path(folder))
    claim_output(output)
    train = write_records(train_records, output / FOLDER, "train")
    held_out = None
    if eval_records is not None:
        held_out = str(write_records(eval_records, output / FOLDER, "eval"))
    return make_config(named | _files(str(train), held_out))


def _known(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what other trainers take and nobody gave."""
    for name, value in keys.items():
        if name in OF_THEIR_TRAINERS and value is not None:
            raise UserError(
                asked=f"Trainer(..., {name}=...)",
                found="no such argument here",
                change=OF_THEIR_TRAINERS[name],
            )
    return {name: value for name, value in keys.items() if name not in OF_THEIR_TRAINERS}


def _some(records: Records | None, name: str) -> Records:
    """The same rows, of which there is at least one."""
    rows = iter(() if records is None else records)
    for first in rows:
        return chain([first], rows)
    raise UserError(asked=name, found="no row in it", change="give at least one")


def _files(train: str, held_out: str | None) -> dict[str, Any]:
    return {"train_files": [train]} | ({} if held_out is None else {"eval_files": [held_out]})


def _keys_of(args: Any) -> dict[str, Any]:
    """What a config would say; other trainers' keys only where they differ from their default."""
    if args is None or isinstance(args, Mapping):
        return dict(args or {})
    if not isinstance(args, TrainingArguments):
        raise UserError(
            asked=f"a {type(args).__name__} as args",
            found="no arguments of a training",
            change="give transformers' TrainingArguments, TRL's SFTConfig, or a dictionary",
        )
    kind: Any = type(args)
    checked = {name: getattr(args, name) for name in ON_THIS_MACHINE if name in vars(args)}
    default = kind(output_dir=args.output_dir, **checked)
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        usual = field.default if field.name in checked else getattr(default, field.name)
        honoured = field.name in TrainConfig.model_fields
        if value == usual and (value is None or not honoured):
            continue
        found[field.name] = value.value if isinstance(value, Enum) else value
    for name in SET_BY_THEMSELVES:
        found.pop(name, None)
    if kind is not TrainingArguments:  # TRL sets it for the GPU, and dtype decides here
        found.pop("bf16", None)
    if found.get("torch_compile") is False:
        del found["torch_compile"]  # their default; layers are compiled one by one here
    return found


def write_records(records: Records, folder: Path, name: str) -> Path:
    """A .jsonl file of the rows, named by what is in it.

    Raises:
        UserError: for a row that is no dictionary, or holds what JSON cannot.
    """
    digest, scratch = xxhash.xxh3_64(), folder / f".{name}.writing"
    folder.mkdir(parents=True, exist_ok=True)
    with scratch.open("w", encoding="utf-8") as file:
        for number, record in enumerate(records):
            line = _line(record, f"row {number} of the {name} dataset")
            digest.update(line.encode())
            file.write(line)
    path = folder / f"{name}-{digest.hexdigest()}.jsonl"
    scratch.replace(path)
    return path


def _line(record: Any, place: str) -> str:
    if not isinstance(record, Mapping):
        raise UserError(
            asked=place,
            found=f"a {type(record).__name__}",
            change="give rows as dictionaries, such as a list of them or a datasets.Dataset",
        )

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic | torch.Tensor):
            return value.tolist()
        raise UserError(
            asked=place,
            found=f"a {type(value).__name__} in it",
            change="give text, numbers, lists and dictionaries",
        )

    return json.dumps(dict(record), default=plain) + "\n"
