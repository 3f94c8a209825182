"""A run that takes more than its plan says so, once."""

from pathlib import Path

import pytest

from .runs import trainer


def test_a_run_beyond_its_plan_is_told_once(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "megatrain.trainer.loop.planned_memory", lambda plan: {"host_memory_gib": 2**30}
    )
    monkeypatch.setattr(
        "megatrain.trainer.loop.memory_in_use", lambda device: {"host_memory_gib": 50.0}
    )
    made = trainer(save_strategy="no")
    made.quiet = False
    made.train()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("the process holds 50.00 GiB, and the plan has 1.00 GiB") == 1
