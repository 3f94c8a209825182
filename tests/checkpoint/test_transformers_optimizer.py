"""What transformers' Trainer wrote: its moments arrive at the right parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from megatrain.errors import UserError
from megatrain.layout import Purpose

from .runs import train, trainer

PATH = "theirs/checkpoint-3"


@pytest.fixture
def theirs(workspace: Path) -> Trainer:
    """A real run of transformers' Trainer, whose optimizer is still there."""
    return run_theirs("models/base")


def run_theirs(model: str, **changes: Any) -> Trainer:
    options = {
        "output_dir": "theirs",
        "max_steps": 3,
        "save_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | changes
    rows = [{"input_ids": ids, "labels": ids} for ids in (list(range(i, i + 9)) for i in range(12))]
    made = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(**options),
        train_dataset=rows,  # type: ignore[arg-type]
    )
    made.train()
    return made


def test_moments_and_masters_are_theirs(theirs: Trainer) -> None:
    made = trainer(resume_from_checkpoint=PATH, max_steps=6)
    assert "which transformers' Trainer wrote, after step 3" in made.notes[-1]
    assert made.resumed is not None
    store = made.resumed.load(made.run, resident=frozenset())
    model, optimizer = theirs.model, theirs.optimizer
    assert model is not None and optimizer is not None
    params: dict[str, Any] = dict(model.named_parameters())
    seen = 0
    for block in made.model.blocks:
        for name, master in store.masters(block.index).items():
            assert torch.equal(master, params[name].detach()), name
            seen += 1
        for purpose in (Purpose.EXP_AVG, Purpose.EXP_AVG_SQ):
            for name, moment in store.moments(block.index, purpose).items():
                assert torch.equal(moment, optimizer.state[params[name]][purpose.value]), name
    assert seen == len(params)
    assert set(store.adam_steps) == {3}
    assert made.progress.step == 3


def test_the_run_goes_on(theirs: Trainer) -> None:
    made = train(resume_from_checkpoint=PATH, max_steps=6)
    assert made.progress.step == 6
    assert Path("out/checkpoint-6").is_dir()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frozen": ["embed"]}, "the state of .* parameters, and .* are trained here"),
        ({"max_steps": 2}, "3 steps done"),
    ],
)
def test_what_does_not_fit_is_one_error(
    changes: dict[str, Any], message: str, theirs: Trainer
) -> None:
    with pytest.raises(UserError, match=message):
        train(resume_from_checkpoint=PATH, **changes)


def test_another_shape_or_optimizer_is_one_error(workspace: Path) -> None:
    run_theirs("models/base", optim="sgd")
    with pytest.raises(UserError, match="no exp_avg of the shape"):
        train(resume_from_checkpoint=PATH, max_steps=6)
