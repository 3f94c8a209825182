"""The short form of benchmarks/kill_and_resume.py, and what signals ask for."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.kill_and_resume import Campaign, make_input

from megatrain.checkpoint import checkpoints, verify
from megatrain.trainer.progress import Progress
from megatrain.trainer.saving import Saver

from .runs import KEYS, OnRow, ScriptedDisk, tensors_of, train, trainer

ROOT = Path(__file__).parents[2]


def test_a_run_that_is_killed_again_and_again_ends_where_it_should(tmp_path: Path) -> None:
    make_input(tmp_path, hidden_size=64)
    campaign = Campaign(tmp_path, seed=1, max_steps=24)
    campaign.run(8)
    assert campaign.kills == 8 and campaign.verified >= 1 and campaign.finished >= 1


def ask(number: signal.Signals, *, at_step: int, made: Any) -> None:
    """Send a signal to this process as soon as a step is done."""

    def then(row: dict[str, Any]) -> None:
        if row["step"] == at_step:
            os.kill(os.getpid(), number)

    made.add_callback(OnRow(then))


@pytest.fixture
def handlers() -> Any:
    """As a terminal has them; a shell's background job ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_ends_the_run(
    number: signal.Signals, workspace: Path, handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    train(output_dir="whole")
    made = trainer(save_steps=100)
    made.quiet = False
    ask(number, at_step=3, made=made)
    with pytest.raises(SystemExit) as caught:
        made.train()
    assert caught.value.code == 128 + number
    said = capsys.readouterr()
    assert f"{number.name}: the run ends after this step" in said.err
    assert f"stopped by {number.name} after step 3; go on from checkpoint-3" in said.out
    assert not (Path("out") / "config.json").exists()
    assert signal.getsignal(number) is before
    train(resume_from_checkpoint="auto", save_steps=100)
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("whole/checkpoint-8"))


@pytest.mark.parametrize(
    ("changes", "saved", "message"),
    [
        ({"save_on_signal": False}, [2], "go on from checkpoint-2"),
        ({"save_on_signal": True, "save_strategy": "no"}, [3], "go on from checkpoint-3"),
        ({"save_strategy": "no"}, [], "there is no checkpoint to go on from"),
    ],
)
def test_whether_a_signal_saves_is_an_option(
    changes: dict[str, Any],
    saved: list[int],
    message: str,
    workspace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = trainer(**changes)
    made.quiet = False
    ask(signal.SIGTERM, at_step=3, made=made)
    with pytest.raises(SystemExit):
        made.train()
    assert list(checkpoints(Path("out"))) == saved
    assert message in capsys.readouterr().out


def test_a_save_that_takes_longer_than_the_grace_is_not_begun(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatrain.trainer.saving.GRACE_S", -1.0)
    made = trainer()
    made.quiet = False
    ask(signal.SIGTERM, at_step=3, made=made)
    with pytest.raises(SystemExit):
        made.train()
    said = capsys.readouterr().out
    assert "longer than the -1 s" in said and "go on from checkpoint-2" in said


def test_a_save_that_runs_already_counts_towards_the_grace(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 s for the one that has just begun, and 20 s for another: more than 30 s."""
    monkeypatch.setattr("megatrain.trainer.saving._write_rate", lambda writer: writer.nbytes / 20)
    let_go, stop, wait = threading.Event(), Saver.stop, Saver.wait
    stopping: list[int] = []

    def late(what: str, path: Path) -> None:
        if what == "write" and "checkpoint-2" in str(path):
            assert let_go.wait(60)

    def stops(saver: Saver, progress: Progress, number: signal.Signals) -> None:
        stopping.append(progress.step)
        stop(saver, progress, number)

    def waits(saver: Saver) -> None:
        if stopping:
            let_go.set()
        wait(saver)

    monkeypatch.setattr(Saver, "stop", stops)
    monkeypatch.setattr(Saver, "wait", waits)
    made = trainer(disk=ScriptedDisk(late))
    made.quiet = False
    ask(signal.SIGTERM, at_step=3, made=made)
    with pytest.raises(SystemExit):
        made.train()
    said = capsys.readouterr().out
    assert list(checkpoints(Path("out"))) == [2]
    assert "takes about 40 s, longer than the 30 s" in said and "go on from checkpoint-2" in said


def test_a_save_can_be_asked_for(workspace: Path) -> None:
    made = trainer(save_steps=100)
    ask(signal.SIGUSR1, at_step=3, made=made)

    def trigger(row: dict[str, Any]) -> None:
        if row["step"] == 5:
            Path("out/SAVE").touch()

    made.add_callback(OnRow(trigger))
    made.train()
    assert list(checkpoints(Path("out"))) == [3, 5, 8]
    assert not Path("out/SAVE").exists()
    for path in checkpoints(Path("out")).values():
        verify(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("where", ["model.writing", "checkpoint-8.writing"])
def test_a_signal_while_the_end_is_written_does_not_cut_it_off(
    where: str, number: signal.Signals, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = []

    def then(what: str, path: Path) -> None:
        if what == "create" and where in str(path) and not sent:
            sent.append(number)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def cut_off(*arguments: Any) -> None:
        raise AssertionError("not the run's handler")

    before = signal.signal(number, cut_off)
    try:
        train(disk=ScriptedDisk(then))
    finally:
        signal.signal(number, before)
    assert sent and (Path("out") / "model.safetensors.index.json").is_file()
    verify(Path("out/checkpoint-8"))
    if where == "model.writing" and number is not signal.SIGUSR1:
        assert f"{number.name}: the run ends when all is written" in capsys.readouterr().err


def test_a_second_interrupt_ends_at_once(workspace: Path) -> None:
    """In a process of its own, which it ends."""
    config = KEYS | {"max_steps": 100_000, "output_dir": str(Path("out").resolve())}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    child = subprocess.Popen(
        [sys.executable, "-m", "megatrain", "train", "c.yaml"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdout is not None and child.stderr is not None
    watchdog = threading.Timer(100, child.kill)
    watchdog.start()
    while "step 3/" not in child.stdout.readline():
        assert child.poll() is None, child.stderr.read()
    child.send_signal(signal.SIGINT)
    assert "the run ends after this step; once more" in child.stderr.readline()
    while child.poll() is None:  # until it is gone, by itself or by the second one
        child.send_signal(signal.SIGINT)
        time.sleep(0.01)
    watchdog.cancel()
    child.stdout.close()
    child.stderr.close()
    assert child.returncode == 130
    for path in checkpoints(Path("out")).values():
        verify(path)
