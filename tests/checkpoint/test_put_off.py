"""`offload: {put_off: ...}` in whole runs without clipping: the same bits, whatever interrupts."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.worker import Worker
from megatrain.errors import UserError
from megatrain.schedule import Op, OpKind

from .runs import OnRow, numbers_of, tensors_of, train, train_until, trainer

NO_CLIP: dict[str, Any] = {"max_grad_norm": 0.0}
ALL: dict[str, Any] = {"offload": {"put_off": "all"}}


def model_of(out: str) -> list[bytes]:
    return [each.read_bytes() for each in sorted(Path(out).glob("*.safetensors"))]


def runs_of(out: str) -> Any:
    found = sorted(Path(out).glob("checkpoint-*"))
    assert found
    return {each.name: (tensors_of(each), numbers_of(each)) for each in found}


def tensors_by_run(out: str) -> Any:
    return {name: tensors for name, (tensors, _) in runs_of(out).items()}


def same(one: str, other: str) -> None:
    """Checkpoints, with their numbers, and the final model."""
    expected, found = runs_of(one), runs_of(other)
    assert expected.keys() == found.keys()
    for name, (tensors, numbers) in expected.items():
        assert tensors == found[name][0], name
        texts = json.dumps(numbers), json.dumps(found[name][1])
        assert texts[0].replace(one, "OUT") == texts[1].replace(other, "OUT"), name
    assert model_of(one) and model_of(one) == model_of(other)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every step": {"save_steps": 1, "max_steps": 4},
    "best": {
        "eval_steps": 2,
        "eval_split": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 2,
    },
    "frozen embed": {"trainable": ["layers[0:]", "head"]},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("put_off", ["all", ["embed", 1]], ids=str)
def test_whole_runs(name: str, put_off: Any, workspace: Path) -> None:
    keys = NO_CLIP | CASES[name]
    train(output_dir="plain", **keys)
    train(output_dir="later", **keys, offload={"put_off": put_off})
    same("plain", "later")


def test_beside_the_disk(workspace: Path) -> None:
    Path("scratch").mkdir()
    keys = NO_CLIP | {"model_name_or_path": "models/shape", "model_init": "random"}
    keys |= {"config_overrides": {"num_hidden_layers": 4}}
    train(output_dir="plain", **keys)
    asked = {"put_off": ["embed", "0", "3", "head"], "disk": ["1-2"], "disk_slots": 1}
    train(output_dir="later", disk_path="scratch", offload=asked, **keys)
    assert tensors_by_run("plain") == tensors_by_run("later")


@pytest.mark.parametrize("first", [{}, ALL])
def test_resumed_with_another(first: dict[str, Any], workspace: Path) -> None:
    train(output_dir="whole", **NO_CLIP)
    train_until(5, **NO_CLIP, **first)
    train(resume_from_checkpoint="auto", **NO_CLIP, offload={"put_off": [0]})
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("whole/checkpoint-8"))
    assert model_of("out") == model_of("whole")


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal(saves: bool, workspace: Path) -> None:
    train(output_dir="whole", save_steps=1, **NO_CLIP)
    made = trainer(**NO_CLIP, **ALL, save_steps=8, save_on_signal=saves)
    made.add_callback(
        OnRow(lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 3 else None)
    )
    with pytest.raises(SystemExit):
        made.train()
    found = sorted(Path("out").glob("checkpoint-*"))
    assert [each.name for each in found] == ["checkpoint-3"] * saves
    if saves:
        assert tensors_of(found[0]) == tensors_of(Path("whole/checkpoint-3"))
    train(**NO_CLIP, resume_from_checkpoint="auto")
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("whole/checkpoint-8"))


def broken(monkeypatch: pytest.MonkeyPatch, step: int, block: int) -> None:
    """The block's gradient is infinite in this step (0: the loss is not finite)."""
    handle = Worker.handle

    def worse(self: Worker, state: Any, op: Op) -> None:
        if state.step == step and op.kind is OpKind.FINISH and op.block == block:
            sums = self.buffers.accumulators[op.slot(next(s.space for s in op.reads))]
            sums.view(torch.float32)[:] = float("inf")
        handle(self, state, op)
        of_loss = op.kind is OpKind.OFFLOAD_LOSS and state.micro_batches
        if block < 0 and state.step == step and of_loss:
            state.home_loss_sum = torch.full_like(state.home_loss_sum, float("nan"))

    monkeypatch.setattr(Worker, "handle", worse)


@pytest.mark.parametrize("block", [1, 3, -1])
@pytest.mark.parametrize("put_off", ["all", ["embed", "head"]], ids=str)
def test_not_finite(
    block: int, put_off: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, 3, block)
    keys = NO_CLIP | {"allow_nonfinite_blocks": True, "save_steps": 1, "max_steps": 6}
    train(output_dir="plain", **keys)
    train(output_dir="later", **keys, offload={"put_off": put_off})
    same("plain", "later")


def test_not_finite_and_not_allowed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, 3, 1)
    for out, more in (("plain", {}), ("later", ALL)):
        with pytest.raises(UserError, match=r"layers.0 is not finite"):
            train(output_dir=out, save_steps=1, **NO_CLIP, **more)
    assert tensors_by_run("plain") == tensors_by_run("later")
    assert sorted(runs_of("later")) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
