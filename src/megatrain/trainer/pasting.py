"""A published run as lines to paste into a config, and in brief."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatrain.config import TrainConfig
from megatrain.trainer.published import PublishedRun

ORDER = (
    "learning_rate",
    "tokens_per_step",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "warmup_steps",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)
"""What matters most first; no source says anything of other keys."""


def lines_to_paste(run: PublishedRun, config: TrainConfig) -> Iterator[str]:
    """A line for each key, with what the config says now; asides are comments."""
    keys, asides = keys_beside(run, config)
    yield f"# {title(run)}: {run.source}."
    if run.remark:
        yield f"# There: {run.remark}."
    yield from (f"# {aside}" for aside in asides)
    lines = {key: f"{key}: {as_yaml(keys[key])}" for key in ORDER if key in keys}
    width = max(map(len, lines.values()))
    for key, line in lines.items():
        now = getattr(config, key)
        said = "as it is" if now == keys[key] else f"now {as_yaml(now)}"
        if key not in config.model_fields_set:
            said += ", by default"
        yield f"{line:{width}}  # {said}"


def keys_beside(run: PublishedRun, config: TrainConfig) -> tuple[dict[str, Any], list[str]]:
    """Keys that go together with the rest of the config, and what must be said beside them."""
    keys, asides, rows = dict(run.keys), list[str](), run.rows_per_step
    if "tokens_per_step" in keys and config.gradient_accumulation_steps != 1:
        keys["gradient_accumulation_steps"] = 1  # tokens_per_step takes its place
    if "lr_scheduler_type" in keys and config.lr_scheduler_kwargs:
        keys.setdefault("lr_scheduler_kwargs", {})  # they were of another schedule
    if not run.names_its_step:
        asides.append("What a step held is not said there, and the rate belongs to it.")
    elif rows is None or not (config.packing or config.tokens_per_step):
        asides.append("Rate and step belong together.")
    else:
        asides.append(f"Rate and step belong together: {rows} samples, so here tokens_per_step is")
        asides.append(f"{rows} times their mean tokens (`megatrain preprocess` counts them).")
        rows = None
    if rows is not None:
        micro_rows = math.gcd(rows, config.per_device_train_batch_size)
        keys["per_device_train_batch_size"] = micro_rows
        keys["gradient_accumulation_steps"] = rows // micro_rows
    steps = keys.get("max_steps", config.max_steps)
    if 0 < steps <= keys.get("warmup_steps", 0):
        warmup = keys.pop("warmup_steps")
        asides.append(f"Its warm-up of {warmup} steps is left out: this run has {steps}.")
    return keys, asides


def title(run: PublishedRun) -> str:
    """Name, year and size."""
    return f"{run.name} ({run.year}, {short(run.params)} parameters)"


def in_brief(run: PublishedRun) -> str:
    """Rate and step, and the source."""
    said = f"learning_rate {as_yaml(run.keys['learning_rate'])}"
    if "tokens_per_step" in run.keys:
        said += f", tokens_per_step {run.keys['tokens_per_step']}"
    elif run.rows_per_step is not None:
        said += f", {run.rows_per_step} samples a step"
    remark = f" ({run.remark})" if run.remark else ""
    return f"{title(run)}: {said}{remark}; {run.source}"


def short(count: float) -> str:
    """1.61e9 as 1.61B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def as_yaml(value: Any) -> str:
    """As YAML 1.1 reads it back: 5e-06 would be text."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(each)}' for key, each in value.items())}}}"
    if value is None:
        return "null"
    if not isinstance(value, float):
        return str(value)
    digits, power, exponent = f"{value:g}".partition("e")
    return f"{digits}{'.0' * (bool(power) and '.' not in digits)}{power}{exponent}"
