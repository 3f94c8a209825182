"""What is published of hyperparameters: runs, and laws of size and tokens, with their sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

CHINCHILLA = 20
"""Tokens a parameter that a given amount of computation is best spent on (Hoffmann et al. 2022,
arXiv:2203.15556)."""


class Job(StrEnum):
    """What a run does to a model."""

    SCRATCH = "scratch"
    CONTINUED = "continued"
    FINE_TUNING = "fine-tuning"

    def in_words(self) -> str:
        return {
            Job.SCRATCH: "training from scratch",
            Job.CONTINUED: "continued pretraining",
            Job.FINE_TUNING: "supervised fine-tuning",
        }[self]


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """What one run used, or a law says."""

    name: str
    job: Job
    params: float
    """Of the model, without embedding and output matrices."""
    year: int
    source: str
    keys: Mapping[str, Any]
    """As in a config; what the source does not say is not there."""
    rows_per_step: int | None = None
    """Samples of a step, where the source counts these and not tokens."""
    tokens: float | None = None
    """Of the whole run."""
    remark: str = ""

    @property
    def names_its_step(self) -> bool:
        """Whether it says how much a step holds, which its learning rate belongs to."""
        return self.rows_per_step is not None or "tokens_per_step" in self.keys


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Every run of published.yaml."""
    text = files("megatrain.trainer").joinpath("published.yaml").read_text(encoding="utf-8")
    found = []
    for family in yaml.safe_load(text):
        name, models = family.pop("family"), family.pop("models")
        job, shared = Job(family.pop("job")), family.pop("keys", {})
        for size, own in models.items():
            own = dict(own)
            told = {key: own.pop(key) for key in ("params", "tokens") if key in own}
            run = family | told | {"name": f"{name} {size}", "job": job, "keys": shared | own}
            found.append(PublishedRun(**run))
    return tuple(found)


STEP_LAW = "Li et al., arXiv:2503.04715"
STEP_LAW_PARAMS, STEP_LAW_TOKENS = (59e6, 1e9), (2e9, 100e9)
"""Of the runs that it was fitted to and tested with."""
DEEPSEEK_COMPUTE = (1e17, 6 * 67e9 * 2e12)
"""FLOPs: from where it was fitted to where its authors used it, 67B parameters on 2T tokens."""


def step_law(params: float, tokens: float) -> PublishedRun | None:
    """1.79 N^-0.713 D^0.307 and 0.58 D^0.571, and how its runs went; None beyond these.

    Args:
        params: N, without embeddings.
        tokens: D, of the whole run.
    """
    if not (_within(params, STEP_LAW_PARAMS) and _within(tokens, STEP_LAW_TOKENS)):
        return None
    return _of_law(
        "Step Law",
        2025,
        STEP_LAW,
        params=params,
        tokens=tokens,
        learning_rate=1.79 * params**-0.713 * tokens**0.307,
        tokens_per_step=0.58 * tokens**0.571,
        keys={
            "warmup_steps": 2000,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-5},
        },
    )


def deepseek_law(params: float, tokens: float) -> PublishedRun | None:
    """0.3118 C^-0.1250 and 0.2920 C^0.3271, C the FLOPs: here 6 N D, without attention."""
    compute = 6 * params * tokens
    if not _within(compute, DEEPSEEK_COMPUTE):
        return None
    return _of_law(
        "DeepSeek LLM's law",
        2024,
        "DeepSeek-AI, arXiv:2401.02954, section 3.1",
        params=params,
        tokens=tokens,
        learning_rate=0.3118 * compute**-0.1250,
        tokens_per_step=0.2920 * compute**0.3271,
        keys={},
        remark=f"at {compute:.1e} FLOPs; fitted from 1e17 to 2e19",
    )


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _of_law(
    name: str,
    year: int,
    source: str,
    *,
    params: float,
    tokens: float,
    learning_rate: float,
    tokens_per_step: float,
    keys: Mapping[str, Any],
    remark: str = "",
) -> PublishedRun:
    """To three digits."""
    digits = {
        "learning_rate": float(f"{learning_rate:.3g}"),
        "tokens_per_step": int(float(f"{tokens_per_step:.3g}")),
    }
    return PublishedRun(
        name=name,
        job=Job.SCRATCH,
        params=params,
        year=year,
        source=source,
        keys=digits | dict(keys),
        tokens=tokens,
        remark=remark,
    )
