"""A run's options: flat, with the names and defaults of Hugging Face and TRL, strict.

An unknown key is an error that suggests the nearest one; well-known synonyms are taken with a
notice; keys of TrainingArguments and SFTConfig that cannot be honoured are refused by name.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatrain.errors import UserError
from megatrain.units import parse_bytes


class TrainConfig(BaseModel):
    """Options of `megatrain train`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    # Model
    model_name_or_path: str = Field(description="Directory of a Hugging Face model, or its id.")
    model_revision: str | None = Field(None, description="Revision of a model id.")
    model_init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Load the weights, or draw them as the model's own code would."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of weights and activations; auto: bfloat16 on a GPU, float32 on the"
        " CPU. Masters and moments are fp32 either way.",
    )
    frozen: list[str] = Field(
        default_factory=list,
        description="Glob patterns over parameter names; what matches is not trained and costs"
        " no optimizer state.",
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")

    # Data
    train_files: list[str] = Field(description="Files, folders or globs (.jsonl, .json, .txt).")
    eval_files: list[str] = Field(default_factory=list, description="Held-out files.")
    eval_split: float = Field(
        0.0, ge=0, description="Rows of train_files to hold out: a count, or a share below 1."
    )
    dataset_format: Literal["auto", "text", "prompt_completion", "messages"] = Field(
        "auto", description="Format of the records; auto looks at the columns of the first one."
    )
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")
    completion_column: str = Field("completion", description="Column that holds the completion.")
    completion_only_loss: bool = Field(True, description="Do not train on the prompt.")
    assistant_only_loss: bool = Field(
        True, description="Train on the assistant's turns only (TRL's default is false)."
    )
    max_length: int = Field(1024, ge=2, description="Tokens per row; the rest is cut off.")
    shuffle: bool = Field(True, description="Permute the rows in each epoch, by seed.")

    # Steps
    num_train_epochs: float = Field(3.0, gt=0, description="Passes over the data.")
    max_steps: int = Field(-1, description="Optimizer steps; overrides epochs if positive.")
    per_device_train_batch_size: int = Field(
        8, ge=1, description="Rows of one micro-batch, unless micro_batch_tokens is set."
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="A step has this many times per_device_train_batch_size rows."
    )
    per_device_eval_batch_size: int = Field(8, ge=1, description="Rows of an evaluation batch.")
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="Padded tokens of one micro-batch; the step's rows stay the same."
    )

    # Optimizer
    learning_rate: float = Field(5e-5, ge=0, description="Peak learning rate.")
    lr_scheduler_type: str = Field("linear", description="A Hugging Face schedule's name.")
    lr_scheduler_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the schedule."
    )
    warmup_steps: float = Field(
        0, ge=0, description="Steps of linear warm-up; below 1: a share of all steps."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay; not on biases and norms.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Clip the global gradient norm; 0 turns clipping off."
    )
    gradient_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="dtype in which a summed gradient waits; by default the compute dtype."
    )

    # Run
    output_dir: str = Field(description="Where the model and the log go.")
    overwrite_output_dir: bool = Field(False, description="Write over an earlier run there.")
    save_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the saved model; auto: the compute dtype."
    )
    max_shard_size: str = Field("5GB", description="Largest weights file.")
    logging_steps: int = Field(1, ge=1, description="Log every so many steps.")
    eval_steps: int | None = Field(
        None, ge=1, description="Evaluate every so many steps, besides before and after training."
    )
    seed: int = Field(42, ge=0, description="Key of order, initialisation and dropout.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where blocks are computed.")
    host_memory: str | None = Field(
        None, description="Host memory that the run may use, such as 100GiB; default: what is free."
    )
    full_determinism: bool = Field(
        False, description="Deterministic kernels on the GPU: the same bits in every run."
    )

    @field_validator("max_shard_size", "host_memory")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bytes(value)
        return value


SYNONYMS = {
    "base_model": "model_name_or_path",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "warmup_ratio": "warmup_steps",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "torch_dtype": "dtype",
    "train_file": "train_files",
    "validation_file": "eval_files",
    "dataset": "train_files",
}

BY_DESIGN = {
    "bf16": "dtype is bfloat16 on a GPU by default; masters are fp32 always",
    "gradient_checkpointing": "every block is recomputed in backward",
    "do_train": "train always trains",
    "optim": "AdamW with fp32 masters and moments",
}

REFUSED = {
    "deepspeed": "megatrain does its own offload",
    "fsdp": "megatrain runs on one GPU",
    "fp16": "use dtype: bfloat16 or float32",
    "packing": "packing is not there yet",
    "resume_from_checkpoint": "resuming is not there yet",
    "save_steps": "only the final model is written so far",
    "save_total_limit": "only the final model is written so far",
    "report_to": "the log is JSON lines in output_dir so far",
    "load_in_8bit": "training is at full precision",
    "load_in_4bit": "training is at full precision",
    "use_peft": "training is of full parameters",
    "push_to_hub": "upload output_dir with huggingface_hub",
    "neftune_noise_alpha": "not supported",
    "label_smoothing_factor": "not supported; the Python API takes any loss",
}


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig, list[str]]:
    """Read a YAML file and apply overrides.

    Args:
        overrides: `--key value` pairs and `key=value` items, as typed; values are YAML.

    Returns:
        The config, and notices about keys that were translated or are met by design.

    Raises:
        UserError: for a missing or malformed file, an unknown or refused key, a wrong type.
    """
    file = Path(path)
    asked = f"config {path}"
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            asked=asked, found=str(error.strerror), change="give a readable YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())
        raise UserError(asked=asked, found=found, change="mend the YAML") from error
    if not isinstance(loaded, dict):
        raise UserError(asked=asked, found="no keys", change="write lines of `key: value`")
    return make_config({**loaded, **parse_overrides(overrides)})


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value` and `key=value` to a dictionary.

    Raises:
        UserError: for anything else.
    """
    found: dict[str, Any] = {}
    rest = list(items)
    while rest:
        item = rest.pop(0)
        key, equals, value = item.removeprefix("--").partition("=")
        if not equals:
            if not item.startswith("--") or not rest:
                raise UserError(
                    asked=f"override '{item}'", found="no value", change="write --key value"
                )
            value = rest.pop(0)
        found[key.replace("-", "_")] = yaml.safe_load(value)
    return found


def make_config(values: dict[str, Any]) -> tuple[TrainConfig, list[str]]:
    """Check keys and types.

    Raises:
        UserError: with one line for each mistake.
    """
    notices, known = [], {}
    for key, value in values.items():
        name = SYNONYMS.get(key, key)
        if name != key:
            notices.append(f"{key} is taken as {name}")
        if key in BY_DESIGN:
            _check_by_design(key, value)
            notices.append(f"{key}: {BY_DESIGN[key]}")
        elif key in REFUSED:
            if value not in (None, False, "none", "no"):
                raise UserError(asked=f"{key}: {value}", found=REFUSED[key], change=f"remove {key}")
        elif name not in TrainConfig.model_fields:
            every = [*TrainConfig.model_fields, *SYNONYMS]
            nearest = difflib.get_close_matches(key, every, n=1)
            raise UserError(
                asked=f"key '{key}'",
                found="no such key",
                change=f"did you mean '{nearest[0]}'" if nearest else "see docs/config.md",
            )
        else:
            known[name] = _fit_type(name, value)
    try:
        return TrainConfig(**known), notices
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}"
            + (f" (found {item['input']!r})" if item["type"] != "missing" else "")
            for item in error.errors()
        ]
        raise UserError(
            asked="this config", found="; ".join(lines), change="see docs/config.md"
        ) from error


def _check_by_design(key: str, value: Any) -> None:
    if key == "optim" and not str(value).startswith("adamw"):
        raise UserError(asked=f"optim: {value}", found="only AdamW is there", change="remove optim")


def _fit_type(name: str, value: Any) -> Any:
    """YAML reads 1 where a float is meant, `1e-5` as text, and one file where a list is meant."""
    annotation = TrainConfig.model_fields[name].annotation
    if annotation is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation == list[str] and isinstance(value, str):
        return [value]
    return value


def document() -> str:
    """docs/config.md, generated."""
    lines = [
        "# Every config key",
        "",
        "Generated by `python -m megatrain.config`; names and defaults are those of Hugging Face"
        " and TRL where they have them.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, info in TrainConfig.model_fields.items():
        kind = getattr(info.annotation, "__name__", "") if isinstance(info.annotation, type) else ""
        kind = kind or str(info.annotation).replace("typing.", "").replace("|", "or")
        if info.is_required():
            default = "required"
        else:
            default = f"`{info.get_default(call_default_factory=True)}`"
        lines.append(f"| `{name}` | {kind} | {default} | {info.description} |")
    lines += ["", "## Synonyms", "", "| key | taken as |", "|---|---|"]
    lines += [f"| `{key}` | `{name}` |" for key, name in SYNONYMS.items()]
    lines += ["", "## Met by design", "", "| key | why |", "|---|---|"]
    lines += [f"| `{key}` | {why} |" for key, why in BY_DESIGN.items()]
    lines += ["", "## Refused", "", "| key | why |", "|---|---|"]
    lines += [f"| `{key}` | {why} |" for key, why in REFUSED.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
