"""`run.json` says what was run, on what, and how it ended; once for each session."""

import json
import signal
from pathlib import Path

import pytest

from megatrain.checkpoint.disk import record_of
from tests.checkpoint.runs import train, trainer
from tests.checkpoint.test_kills import ask


def test_a_run_that_is_stopped_and_resumed_has_two_entries(workspace: Path) -> None:
    made = trainer(eval_split=4)
    ask(signal.SIGTERM, at_step=3, made=made)
    with pytest.raises(SystemExit):
        made.train()
    train(eval_split=4, resume_from_checkpoint="auto")
    first, second = json.loads(Path("out/run.json").read_text())["sessions"]
    assert (first["from_step"], first["how"]) == (0, "stopped by SIGTERM")
    assert (second["from_step"], second["how"]) == (3, "finished")
    assert second["results"]["step"] == second["total_steps"] == 8
    assert second["results"]["eval_loss"] > 0 and second["results"]["loss"] > 0
    (file,) = first["data"]["files"].values()
    assert file["digest"] == record_of(Path("data/train.jsonl")).digest
    assert first["data"]["rows"]["rows"] == 24 and first["data"]["held_out_rows"] == 4
    assert first["config"]["max_steps"] == 8
    assert first["versions"]["torch"] and first["hardware"]["cores"]
    assert first["began"] <= first["ended"] <= second["began"]


def test_a_run_that_fails_says_so(workspace: Path) -> None:
    made = trainer()
    made._record = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        made.train()
    (only,) = json.loads(Path("out/run.json").read_text())["sessions"]
    assert only["how"] == "failed" and only["results"]["step"] == 1
