"""`offload` in a run's config: laid out as asked, the same bits, refused before data is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import UserError

from .runs import tensors_of, trainer

KEYS: dict[str, Any] = {
    "model_name_or_path": "models/shape",
    "model_init": "random",
    "config_overrides": {"num_hidden_layers": 6},
    "checkpoint_memory": "1MiB",
    "save_steps": 8,
}


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["no_clip", "clip"])
def test_a_run_is_laid_out_as_asked_and_the_same(
    max_grad_norm: float, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(**KEYS, max_grad_norm=max_grad_norm, output_dir="chosen").train()
    Path("scratch").mkdir()
    asked = {"saved": [1, "3-4"], "disk": ["2-3"], "weight_slots": 3, "disk_slots": 2}
    made = trainer(**KEYS, max_grad_norm=max_grad_norm, disk_path="scratch", offload=asked)
    plan = made._plan()
    assert plan.options.saved == {2, 4, 5}
    assert (plan.options.layer_weight_slots, plan.options.disk_slots) == (3, 2)
    assert plan.disk is not None and plan.disk.tier.blocks == {3, 4}
    made.quiet = False
    made.train()
    said = " ".join(capsys.readouterr().out.split())
    assert "as asked for in offload: saved: [1, '3-4'], disk: ['2-3'], weight_slots: 3" in said
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("chosen/checkpoint-8"))
    found = json.loads(Path("out/run.json").read_text())["sessions"][-1]["plan"]["disk"]
    assert found["blocks"] == [3, 4]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"resident": 1}, "no GPU that 'resident' could be about"),
        ({"disk": 1}, "set disk_path"),
        ({"saved": ["6"]}, "layers are 0 to 5"),
    ],
)
def test_what_cannot_be_is_refused_before_data_is_read(
    asked: dict[str, Any], message: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    monkeypatch.setattr("megatrain.trainer.prepare.load_data", never)
    with pytest.raises(UserError, match=message):
        trainer(**KEYS, offload=asked)
