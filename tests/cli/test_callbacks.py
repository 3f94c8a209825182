"""transformers' callbacks: the events that its Trainer has, and wishes that are obeyed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers import Trainer as TheirTrainer

from megatrain.checkpoint import checkpoints, verify
from megatrain.errors import UserError
from tests.checkpoint.runs import MEASURED, trainer

from .test_commands import log_of
from .test_rhythms import RISING, steps_with

THEIRS_ALONE = {
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_prediction_step",
    "on_predict",
    "on_push_begin",
}
SUMMARY = {
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
}
SAME = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "logging_steps": 4}


class Recorder(TrainerCallback):
    """Writes down every event and the step that it came at, and every row."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.states: dict[int, dict[str, Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in THEIRS_ALONE:
            return super().__getattribute__(name)

        def record(args: Any, state: TrainerState, control: Any, **given: Any) -> None:
            self.events.append((name, state.global_step))
            if name == "on_log":
                self.rows.append({"step": state.global_step} | given["logs"])
                assert state.log_history[-1] == self.rows[-1]
            if name == "on_save":
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                self.states[state.global_step] = json.loads(
                    (folder / "trainer_state.json").read_text()
                )
                assert vars(state) == self.states[state.global_step]

        return record


class Wishing(TrainerCallback):
    """Sets flags of the control at an event of a step."""

    def __init__(self, event: str, step: int, *flags: str) -> None:
        self.at, self.flags = (event, step), flags

    def _wish(self, event: str, state: TrainerState, control: TrainerControl) -> None:
        if (event, state.global_step) == self.at:
            for flag in self.flags:
                setattr(control, flag, True)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wish("on_step_end", state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wish("on_epoch_end", state, control)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wish("on_log", state, control)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wish("on_save", state, control)


def of_theirs(made: Any) -> Recorder:
    """What transformers' Trainer tells on the same rows, in the same rhythm."""
    recorder = Recorder()

    def tensors(rows: Any) -> list[dict[str, Any]]:
        return [{"input_ids": row.input_ids, "labels": row.input_ids} for row in rows]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        length = min(len(row["input_ids"]) for row in rows)
        return {
            key: torch.stack([torch.as_tensor(r[key][:length]) for r in rows]) for key in rows[0]
        }

    arguments = TrainingArguments(
        output_dir="theirs",
        per_device_train_batch_size=4,
        max_steps=8,
        save_steps=3,
        learning_rate=1e-3,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to=[],
        **SAME,
    )
    TheirTrainer(
        AutoModelForCausalLM.from_pretrained("models/base"),
        arguments,
        data_collator=collate,
        train_dataset=tensors(made.run.data.train_rows),
        eval_dataset=tensors(made.run.data.eval_rows),
        callbacks=[recorder],
    ).train()
    return recorder


def test_events_and_rows_are_those_of_transformers_in_its_order(workspace: Path) -> None:
    recorder = Recorder()
    made = trainer(eval_split=4, save_steps=3, **SAME)
    made.add_callback(recorder)
    made.callbacks.fire("on_init_end")
    made.train()
    theirs = of_theirs(made)
    ours_then, theirs_then = (
        [event for event in each.events if event[0] != "on_save"] for each in (recorder, theirs)
    )
    assert ours_then == theirs_then
    assert len(recorder.rows) == len(theirs.rows) == 8
    names = {name for row in theirs.rows for name in row}
    for row, of_theirs_ in zip(recorder.rows, theirs.rows, strict=True):
        assert names & set(row) == set(of_theirs_)
        for name in ("step", "epoch", "learning_rate"):
            assert row.get(name) == pytest.approx(of_theirs_.get(name), abs=1e-12)
    assert set(theirs.rows[-1]) == SUMMARY | {"step", "epoch"}
    saved = [step for name, step in recorder.events if name == "on_save"]
    assert saved == [3, 6, 8] == sorted(recorder.states)
    assert [len(recorder.states[step]["log_history"]) for step in saved] == [2, 5, 7]


def test_a_wish_to_log_to_evaluate_and_to_save_is_met_at_once(workspace: Path) -> None:
    wishes = ("should_log", "should_evaluate", "should_save")
    made = trainer(eval_split=4, eval_on_start=False, logging_steps=8, save_steps=8)
    made.add_callback(Wishing("on_step_end", 3, *wishes))
    made.add_callback(Wishing("on_epoch_end", 5, *wishes))
    made.train()
    for name in ("loss", "eval_loss"):
        assert steps_with(name) == [3, 5, 8]
    assert list(checkpoints(Path("out"))) == [3, 5, 8]
    for path in checkpoints(Path("out")).values():
        verify(path)


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_epoch_end", "on_save"])
def test_a_wish_to_stop_ends_the_run_with_a_checkpoint_and_the_model(
    event: str, workspace: Path
) -> None:
    """An epoch is six steps; a checkpoint is whole a step or more after its own."""
    step = 4 if event == "on_save" else 6
    made = trainer(max_steps=200, save_steps=4)
    made.add_callback(Wishing(event, step, "should_training_stop"))
    made.train()
    last = made.progress.step
    assert last == step or (event == "on_save" and step < last < 200)
    assert last in checkpoints(Path("out")) and Path("out/config.json").is_file()
    (session,) = json.loads(Path("out/run.json").read_text())["sessions"]
    assert session["how"] == "ended early: a callback asked for it"


def test_early_stopping_by_transformers_is_that_by_the_config(workspace: Path) -> None:
    options = RISING | {"load_best_model_at_end": True, "save_steps": 1}
    options |= {"metric_for_best_model": "eval_loss"}
    own = trainer(**options, early_stopping_patience=3, output_dir="own")
    own.train()
    made = trainer(**options)
    made.add_callback(EarlyStoppingCallback(3))
    made.train()
    assert made.progress.step == own.progress.step < 24


def test_what_is_logged_is_what_callbacks_get(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    class Reader(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert given["processing_class"] is not None and given["model"] is None
            assert state.log_history[-1] == {"step": state.global_step} | given["logs"]
            assert args.learning_rate == 1e-3 and args.logging_steps == 2
            seen.append({"step": state.global_step} | given["logs"])

    made = trainer(logging_steps=2, save_strategy="no")
    made.add_callback(Reader)
    made.add_callback(PrinterCallback())  # changes the logs that it is given
    made.train()
    assert seen == log_of("out")
    assert "'grad_norm': '" in capsys.readouterr().out
    assert set(seen[0]) - MEASURED >= {"loss", "grad_norm", "learning_rate", "epoch"}


def test_what_cannot_be_done_is_one_error(workspace: Path) -> None:
    made = trainer()
    with pytest.raises(UserError, match=r"callbacks: a str.*transformers\.TrainerCallback"):
        made.add_callback("early")  # type: ignore[arg-type]
    made.add_callback(Wishing("on_step_end", 2, "should_epoch_stop"))
    with pytest.raises(UserError, match=r"should_epoch_stop.*set should_training_stop"):
        made.train()
