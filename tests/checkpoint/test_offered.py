"""Which checkpoint is offered in place of a damaged one: one that looks whole."""

import shutil
from pathlib import Path

import pytest

from megatrain.checkpoint import instead_of
from megatrain.errors import UserError

from .runs import train, trainer
from .test_faults import cut, finished, flip

__all__ = ["finished"]

STATE = "training_state/state.json"
BLOCK = "training_state/block-00001.safetensors"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4, 6 and 8."""
    for step, source in {2: 2, 4: 4, 6: 4, 8: 4}.items():
        shutil.copytree(finished / f"checkpoint-{source}", tmp_path / f"out/checkpoint-{step}")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("harmed", "offered"),
    [
        ({}, 4),
        ({4: BLOCK}, 2),
        ({4: "training_state/manifest.json"}, 2),
        ({4: "tokenizer.json", 2: STATE}, 8),
        ({4: STATE, 2: STATE, 8: BLOCK}, None),
    ],
)
def test_it_is_the_nearest_earlier_one_or_else_a_later_one(
    harmed: dict[int, str], offered: int | None, out: Path
) -> None:
    for step, name in harmed.items():
        cut(out / f"checkpoint-{step}" / name)
    expected = None if offered is None else out / f"checkpoint-{offered}"
    assert instead_of(out / "checkpoint-6") == expected
    shutil.rmtree(out / "checkpoint-6")  # whatever is left of it
    assert instead_of(out / "checkpoint-6") == expected


def test_files_are_not_read_but_looked_for(out: Path) -> None:
    flip(out / "checkpoint-4" / BLOCK)
    assert instead_of(out / "checkpoint-6") == out / "checkpoint-4"
    (out / "checkpoint-4" / BLOCK).unlink()
    assert instead_of(out / "checkpoint-6") == out / "checkpoint-2"
    shutil.copy(out / "checkpoint-2" / BLOCK, out / "checkpoint-2/model.safetensors")
    assert instead_of(out / "checkpoint-6") == out / "checkpoint-8"


def test_the_last_of_all_goes_before_one_without_a_step(out: Path) -> None:
    assert instead_of(out / "abandoned-checkpoint-4-1") == out / "checkpoint-8"
    assert instead_of(out.parent / "no/such/directory") is None


def test_models_alone_are_not_offered(workspace: Path) -> None:
    train(max_steps=4, save_only_model=True)
    assert instead_of(Path("out/checkpoint-4")) is None


def test_a_damaged_one_that_was_asked_for_names_it(workspace: Path) -> None:
    train(max_steps=6)
    cut(Path("out/checkpoint-6") / STATE)
    cut(Path("out/checkpoint-4") / BLOCK)
    # A run that is refused holds its lock as long as its error is looked at.
    with pytest.raises(UserError, match=r"state\.json has \d+ bytes") as caught:
        trainer(resume_from_checkpoint="out/checkpoint-6", output_dir="first")
    assert caught.value.change.startswith("resume from out/checkpoint-2,")
    train(resume_from_checkpoint="out/checkpoint-2", output_dir="second")
    cut(Path("out/checkpoint-2") / BLOCK)
    with pytest.raises(UserError, match="resume from another checkpoint"):
        trainer(resume_from_checkpoint="out/checkpoint-6", output_dir="third")
