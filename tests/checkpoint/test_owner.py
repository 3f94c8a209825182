"""A directory belongs to one run at a time, also if it is removed under it."""

from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint import Lock, checkpoints
from megatrain.errors import UserError

from .runs import OnRow, train, trainer


def test_a_second_run_in_the_same_directory_is_refused(workspace: Path) -> None:
    first = trainer()
    with pytest.raises(UserError, match="another run that is writing there"):
        trainer(overwrite_output_dir=True)
    first.train()
    train(overwrite_output_dir=True)


def test_a_run_that_was_refused_leaves_the_directory_free(workspace: Path) -> None:
    """Also to whoever still holds the error, as a notebook does."""
    with pytest.raises(UserError, match="no way to write there") as refused:
        trainer(trace="/proc/trace.json")
    train()
    assert refused.value.__traceback__ is not None


def test_a_directory_that_another_run_has_taken_over_is_left_to_it(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Removed under the one that is running, and then given to another."""
    taken: list[Lock] = []

    def act(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            Path("out").rename("gone")
            Path("out").mkdir()
            taken.append(Lock(Path("out")))

    made = trainer(save_steps=4)
    made.add_callback(OnRow(act))
    made.quiet = False
    with pytest.raises(UserError, match="another run that is writing there"):
        made.train()
    said = capsys.readouterr().out
    assert "CHECKPOINT-4 WAS NOT WRITTEN (UserError: output_dir: " in said
    assert checkpoints(Path("out")) == {} and not (Path("out") / "config.json").exists()


def test_a_directory_that_was_removed_is_locked_again(workspace: Path) -> None:
    def act(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            Path("out").rename("gone")
        if row["step"] == 7:
            with pytest.raises(UserError, match="another run that is writing there"):
                Lock(Path("out"))

    made = trainer(save_steps=4)
    made.add_callback(OnRow(act))
    made.train()
    assert 8 in checkpoints(Path("out"))
