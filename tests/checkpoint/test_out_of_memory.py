"""A run for which the GPU has no room keeps its last whole step, and never a torn one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.state import StepState
from megatrain.engine.worker import Worker
from megatrain.errors import UserError
from megatrain.schedule import Op, OpKind

from .runs import tensors_of, train, trainer

FAILS = 6
"""The step that finds no room; checkpoints are due after steps 2, 4, ..."""


def no_room(monkeypatch: pytest.MonkeyPatch, kind: OpKind, block: int) -> None:
    """For an operation on a block, in one step of a run."""
    handle = Worker.handle

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("made up")

    def limited(self: Worker, state: StepState, op: Op) -> None:
        if (state.step, op.kind, op.block) != (FAILS - 1, kind, block) or not state.micro_batches:
            handle(self, state, op)
        elif kind is OpKind.UPDATE:  # when it has begun
            handle(replace(self, host_updater=fail), state, op)
        else:
            fail()

    monkeypatch.setattr(Worker, "handle", limited)


def failed(monkeypatch: pytest.MonkeyPatch, kind: OpKind, block: int, **changes: Any) -> UserError:
    made = trainer(max_steps=8, **changes)
    with monkeypatch.context() as patch:
        no_room(patch, kind, block)
        with pytest.raises(UserError, match="no room") as caught:
            made.train()
    return caught.value


def saved() -> list[str]:
    return sorted(path.name for path in Path("out").glob("checkpoint-*"))


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD])
def test_the_last_whole_step_is_saved_and_gone_on_from(
    kind: OpKind, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(output_dir="whole")
    error = failed(monkeypatch, kind, 1)
    assert error.asked.startswith(f"after step {FAILS - 1}, {kind} of layers.0, micro-batch 0 of")
    assert error.change.endswith("go on from checkpoint-5 with resume_from_checkpoint: auto")
    assert saved() == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    train(resume_from_checkpoint="auto")
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("whole/checkpoint-8"))


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD])
def test_layers_on_the_disk(kind: OpKind, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is whole or is not there, however far the disk was."""
    Path("scratch").mkdir()
    train(output_dir="whole")
    failed(monkeypatch, kind, 1, disk_path="scratch", offload={"disk": "0-1"})
    assert saved()[:2] == ["checkpoint-2", "checkpoint-4"]
    train(resume_from_checkpoint="auto")
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("whole/checkpoint-8"))


@pytest.mark.parametrize(
    ("kind", "block", "changes"),
    [
        (OpKind.BACKWARD, 1, {"max_grad_norm": 0.0}),
        (OpKind.UPDATE, 1, {"max_grad_norm": 0.0}),
        (OpKind.UPDATE, 1, {}),
    ],
)
def test_a_torn_state_is_not_saved(
    kind: OpKind,
    block: int,
    changes: dict[str, Any],
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = failed(monkeypatch, kind, block, **changes)
    assert error.change.endswith("go on from checkpoint-4 with resume_from_checkpoint: auto")
    assert saved() == ["checkpoint-2", "checkpoint-4"]


def test_without_checkpoints_there_is_none(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failed(monkeypatch, OpKind.FORWARD, 1, save_strategy="no")
    assert error.change.endswith("there is no checkpoint to go on from")
    assert saved() == []
