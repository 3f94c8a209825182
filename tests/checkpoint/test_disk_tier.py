"""Runs whose last layers live on a disk: the same checkpoints, models and errors as in memory."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint import checkpoints, verify
from megatrain.errors import UserError
from megatrain.trainer import Trainer

from .runs import ScriptedDisk, tensors_of, trainer

KEYS: dict[str, Any] = {
    "model_name_or_path": "models/shape",
    "model_init": "random",
    "config_overrides": {"num_hidden_layers": 12},
    "checkpoint_memory": "1MiB",
    "save_steps": 3,
}
"""Enough layers to save memory with three of them on the host at a time."""


def run(disk: ScriptedDisk | None = None, **changes: Any) -> Trainer:
    made = trainer(disk=disk, **KEYS | changes)
    made.train()
    return made


def session(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(output) / "run.json").read_text())["sessions"][-1]
    return found


def short_of_memory(made: Trainer, nbytes: int) -> str:
    """`host_memory` so many bytes below what the run needs."""
    plan = made._plan()
    return str(plan.need.host_total + plan.need.device_slots - nbytes)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["no_clip", "clip"])
def test_a_run_with_layers_on_the_disk_is_the_same_run(
    max_grad_norm: float, workspace: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(max_grad_norm=max_grad_norm, output_dir="whole")
    keys: dict[str, Any] = KEYS | {
        "max_grad_norm": max_grad_norm,
        "host_memory": short_of_memory(whole, 200_000),
        "disk_path": str(scratch),
    }
    made = trainer(**keys)
    made.quiet = False
    made.train()
    said = " ".join(capsys.readouterr().out.split())
    for step in (3, 6, 8):
        verify(Path(f"out/checkpoint-{step}"))
        assert tensors_of(Path(f"out/checkpoint-{step}")) == tensors_of(
            Path(f"whole/checkpoint-{step}")
        )
    weights = [path.name for path in Path("whole").glob("model*.safetensors")]
    for name in weights:
        assert (Path("out") / name).read_bytes() == (Path("whole") / name).read_bytes()
    plan, results = session("out")["plan"]["disk"], session("out")["results"]
    assert plan["blocks"] and max(plan["blocks"]) == 12 and 0 not in plan["blocks"]
    assert f"state of {len(plan['blocks'])} blocks; a step reads" in said
    assert results["disk_bytes_written"] >= 8 * plan["written_bytes_per_step"] > 0
    assert results["disk_bytes_read"] >= 7 * plan["read_bytes_per_step"] > 0
    assert session("whole")["plan"]["disk"] is None
    assert not list(scratch.iterdir())


def test_a_checkpoint_is_resumed_wherever_blocks_live(workspace: Path, scratch: Path) -> None:
    whole = run(output_dir="whole")
    less = {"host_memory": short_of_memory(whole, 200_000), "disk_path": str(scratch)}
    for source, changes in (("whole", less), ("out", {})):
        folder = f"from-{source}"
        run(output_dir=folder, resume_from_checkpoint=f"{source}/checkpoint-3", **changes)
        assert tensors_of(Path(folder) / "checkpoint-8") == tensors_of(Path("whole/checkpoint-8"))
        run(output_dir="out", overwrite_output_dir=True, **less)


@pytest.mark.parametrize(
    ("call", "error"),
    [("preadv", errno.EIO), ("pwritev", errno.EIO), ("pwritev", errno.ENOSPC)],
    ids=["read", "write", "full"],  # full: where a reservation is not kept, as on btrfs
)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["no_clip", "clip"])
def test_a_disk_that_fails_in_a_step_leaves_the_last_checkpoint(
    call: str,
    error: int,
    max_grad_norm: float,
    workspace: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run(max_grad_norm=max_grad_norm, output_dir="whole")
    broken = [False]
    real = getattr(os, call)

    def breaks(*arguments: Any) -> int:
        if broken[0]:
            raise OSError(error, os.strerror(error))
        done: int = real(*arguments)
        return done

    def look(what: str, path: Path) -> None:
        if what == "rename" and path.name == "checkpoint-3":
            broken[0] = True

    monkeypatch.setattr(os, call, breaks)
    keys: dict[str, Any] = {
        "max_grad_norm": max_grad_norm,
        "host_memory": short_of_memory(whole, 200_000),
        "disk_path": str(scratch),
    }
    with pytest.raises(UserError, match=rf"scratch space in .*: {os.strerror(error)}"):
        run(ScriptedDisk(look), **keys)
    # Training goes on while the third step is written: the sixth may be whole by then, no other.
    assert list(checkpoints(Path("out"))) in ([3], [3, 6])
    assert session("out")["how"] == "failed"
    broken[0] = False
    run(resume_from_checkpoint="auto", **keys)
    assert tensors_of(Path("out/checkpoint-8")) == tensors_of(Path("whole/checkpoint-8"))


def test_scratch_space_and_checkpoints_are_counted_together(
    workspace: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    class Small(ScriptedDisk):
        free = 0

        def free_bytes(self, path: Path) -> int:
            return self.free

    whole = run(output_dir="whole")
    less = {"host_memory": short_of_memory(whole, 200_000), "disk_path": str(scratch)}
    assert whole.run.contents is not None
    Small.free = 2 * (whole.run.contents.nbytes + 2**26) + 10_000
    made = trainer(disk=Small(), **KEYS | less)  # two checkpoints alone would fit
    monkeypatch.setattr("megatrain.trainer.trainer.BlockStore", never)
    with pytest.raises(UserError, match=r"beside .* of scratch space .*room for 2 is needed"):
        made.train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"disk_path": "nowhere"}, r"disk_path: nowhere: no such directory\. give an existing"),
        ({"disk_path": "data/train.jsonl"}, "disk_path: data/train.jsonl: a file"),
        ({"disk_path": "scratch", "disk_memory": "4KiB"}, "4.00 KiB allowed by disk_memory"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, str], message: str, workspace: Path, scratch: Path
) -> None:
    whole = run(output_dir="whole")
    with pytest.raises(UserError, match=message):
        run(host_memory=short_of_memory(whole, 3_000), **changes)


def test_a_run_that_fits_leaves_the_disk_alone(workspace: Path, scratch: Path) -> None:
    run(disk_path=str(scratch))
    assert session("out")["plan"]["disk"] is None
    assert "disk_bytes_read" not in session("out")["results"]
