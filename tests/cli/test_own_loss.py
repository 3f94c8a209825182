"""A loss of one's own through the whole trainer: what is trained, evaluated, recorded, refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megatrain.config import make_config
from megatrain.engine import Loss
from megatrain.errors import UserError
from megatrain.trainer import Trainer
from tests.checkpoint.runs import KEYS
from tests.numerics.harness import ADAMW, Reference, assert_close

from .test_commands import log_of

SMOOTHING, Z = 0.2, 1e-2
OPTIONS: dict[str, Any] = KEYS | {
    "adam_beta1": ADAMW.beta1,
    "adam_beta2": ADAMW.beta2,
    "adam_epsilon": ADAMW.eps,
    "weight_decay": ADAMW.weight_decay,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.5,
    "eval_split": 4,
    "save_strategy": "no",
}


def smoothed(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Label-smoothed cross-entropy and z-loss, written by hand."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1)
    of_target = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
    hits, spread = normaliser - of_target, normaliser - logits.mean(-1)
    losses = (1 - SMOOTHING) * hits + SMOOTHING * spread + Z * normaliser.square()
    return (losses * weights).sum()


def smoothed_by_torch(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The same."""
    flat = logits.flatten(0, 1)
    losses = F.cross_entropy(
        flat, labels.flatten(), reduction="none", label_smoothing=SMOOTHING
    ) + Z * flat.logsumexp(-1).pow(2)
    return (losses * weights.flatten()).sum()


class Hardest:
    """The square of each row's loss: rows that are hard count more.  No sum over tokens."""

    whole_logits = True

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
        return (losses * weights).sum(-1).square().sum()


def train(loss: Loss, **changes: Any) -> Trainer:
    config, _ = make_config(OPTIONS | changes)
    made = Trainer(config, loss=loss, quiet=True)
    made.train()
    return made


@pytest.mark.parametrize(
    ("own", "of_torch"), [(smoothed, smoothed_by_torch), (Hardest(), Hardest())]
)
def test_losses_and_weights_are_those_of_autograd(
    own: Loss, of_torch: Any, workspace: Path
) -> None:
    made = train(own)
    reference = Reference(
        AutoModelForCausalLM.from_pretrained("models/base"),
        learning_rate=1e-3,
        max_grad_norm=0.5,
        rows_per_micro=2,
        loss=of_torch,
    )
    rows = [row for row in log_of("out") if "loss" in row]
    assert len(rows) == 8
    for row in rows:
        taken = made.run.sampler.take(made.run.data.train_rows, row["step"] - 1)
        step = reference.step(taken)
        assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(step.norm, rel=1e-4)
    after = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert_close(after, reference.model.state_dict(), relative=1e-5, what="weight")
    held_out = Reference(reference.model, learning_rate=0, max_grad_norm=0, rows_per_micro=2)
    held_out.loss = of_torch
    (_, last) = (row for row in log_of("out") if "eval_loss" in row)
    assert last["eval_loss"] == pytest.approx(held_out.step(made.run.data.eval_rows).loss, rel=1e-5)


def test_a_perplexity_is_that_of_cross_entropy_alone(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = make_config(OPTIONS | {"max_steps": 1})
    output = Trainer(config, loss=smoothed).train()
    assert "eval_loss" in output.metrics and "eval_perplexity" not in output.metrics
    assert not any("perplexity" in name for row in log_of("out") for name in row)
    said = capsys.readouterr().out
    assert "loss: tests.cli.test_own_loss.smoothed; no perplexity" in said
    assert "perplexity" not in said.split("held-out after")[1]
    (session,) = json.loads(Path("out/run.json").read_text())["sessions"]
    assert session["loss"] == "tests.cli.test_own_loss.smoothed"
    assert "eval_perplexity" not in session["results"]
    with pytest.raises(UserError, match=r"metric_for_best_model: perplexity: .*smoothed.*lowest"):
        train(smoothed, metric_for_best_model="perplexity", output_dir="other")


def test_the_best_model_is_that_of_the_lowest_own_loss(workspace: Path) -> None:
    """Trained to be bad at text, by cross-entropy or not."""
    keys = {"eval_split": 0.0, "eval_files": ["data/text"], "learning_rate": 0.1}
    keys |= {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 24}
    made = train(smoothed, load_best_model_at_end=True, early_stopping_patience=3, **keys)
    losses = {row["step"]: row["eval_loss"] for row in log_of("out") if row.get("eval_loss")}
    del losses[0]
    best = min(losses, key=lambda step: losses[step])
    assert made.progress.step == best + 3 < 24
    assert (made.progress.best_step, made.progress.best_loss) == (best, losses[best])


def test_a_run_that_goes_on_with_another_loss_says_so(workspace: Path) -> None:
    train(partial(smoothed), max_steps=2, save_strategy="steps")
    config, _ = make_config(OPTIONS | {"save_strategy": "steps", "resume_from_checkpoint": "auto"})
    (told,) = (note for note in Trainer(config, quiet=True).notes if "loss" in note)
    assert told == (
        "changed since checkpoint-2: loss: megatrain.engine.loss.cross_entropy,"
        " was tests.cli.test_own_loss.smoothed"
    )
    assert not any("loss:" in note for note in Trainer(config, loss=smoothed, quiet=True).notes)


def of_mean(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    del weights
    return F.cross_entropy(logits.float(), labels)


def without_weights(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    del weights
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def of_each_token(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none") * weights


def in_half(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return smoothed(logits, labels, weights).bfloat16()


def detached(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return smoothed(logits.detach(), labels, weights)


def of_a_number(logits: Tensor, labels: Tensor, weights: Tensor) -> Any:
    return smoothed(logits, labels, weights).item()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (of_mean, "of_mean: .* for three tokens whose weighted sum is .*not a mean"),
        (without_weights, "without_weights: .*times its weight"),
        (of_each_token, r"of_each_token: torch\.float32 of shape \(3,\)\. return the weighted sum"),
        (in_half, r"in_half: torch\.bfloat16 of shape \(\)"),
        (detached, r"detached: .* without a gradient"),
        (of_a_number, "of_a_number: a float"),
    ],
)
def test_what_is_no_weighted_sum_is_refused(loss: Any, message: str, workspace: Path) -> None:
    config, _ = make_config(OPTIONS)
    with pytest.raises(UserError, match=message):
        Trainer(config, loss=loss, quiet=True)
