"""`run.json` says what was run, on what, and how it ended; once for each session."""

import json
import signal
from pathlib import Path

import pytest

from megatrain.errors import UserError
from tests.checkpoint.runs import OnRow, ScriptedDisk, full, train, trainer
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
    assert first["data"]["files"] == {"data/train.jsonl": Path("data/train.jsonl").stat().st_size}
    assert first["data"]["digest"] == made.run.data.digest
    assert first["data"]["rows"]["rows"] == 24 and first["data"]["held_out_rows"] == 4
    assert first["config"]["max_steps"] == 8
    assert first["versions"]["torch"] and first["hardware"]["cores"]
    assert first["began"] <= first["ended"] <= second["began"]


def test_a_run_whose_model_cannot_be_written_has_failed(workspace: Path) -> None:
    def fails(what: str, path: Path) -> None:
        if what == "create" and ".model.writing" in str(path):
            raise full()

    with pytest.raises(UserError, match=r"the final model in .*No space left"):
        train(disk=ScriptedDisk(fails))
    (only,) = json.loads(Path("out/run.json").read_text())["sessions"]
    assert only["how"] == "failed" and only["results"]["step"] == 8


def test_a_run_that_fails_says_so(workspace: Path) -> None:
    made = trainer()
    made.add_callback(OnRow(lambda row: row["no such figure"]))
    with pytest.raises(KeyError):
        made.train()
    (only,) = json.loads(Path("out/run.json").read_text())["sessions"]
    assert only["how"] == "failed" and only["results"]["step"] == 1
