"""Disks that fill, files that rot, directories that vanish: the last checkpoint stays whole."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain import preflight
from megatrain.checkpoint import checkpoints, last_whole, manifest, read_state, verify
from megatrain.errors import UserError
from megatrain.evaluation import EvalResult
from megatrain.trainer import Trainer, loop

from .runs import ScriptedDisk, full, tensors_of, train, trainer

LAST = "checkpoint-8"


def notes_of(made: Trainer, capsys: pytest.CaptureFixture[str]) -> str:
    """What the run says."""
    made.quiet = False
    made.train()
    return capsys.readouterr().out


class Full:
    """Refuses writes whose paths contain a text, for some times."""

    def __init__(self, where: str, *, what: str = "write", times: int = 1, after: int = 0) -> None:
        self.where, self.what, self.times, self.after = where, what, times, after

    def __call__(self, what: str, path: Path) -> None:
        if what == self.what and self.where in str(path) and self.times:
            if self.after:
                self.after -= 1
                return
            self.times -= 1
            raise full()


@pytest.mark.parametrize(
    "fault",
    [
        Full("checkpoint-4.writing", after=12),
        Full("checkpoint-4.writing", what="close", after=3),
        Full("checkpoint-4.writing", what="create"),
        Full("checkpoint-4.writing", what="mkdir"),
        Full("checkpoint-4.writing/training_state/manifest.json"),
        Full("checkpoint-4", what="rename"),
        Full("checkpoint-4.writing", what="sync"),
    ],
    ids=["write", "fsync", "create", "mkdir", "manifest", "rename", "sync"],
)
def test_a_save_that_fails_leaves_the_run_and_the_last_checkpoint(
    fault: Full, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(output_dir="whole")

    def look_then_fail(what: str, path: Path) -> None:
        if what == fault.what and fault.where in str(path) and not fault.after and fault.times:
            verify(Path("out/checkpoint-2"))
        fault(what, path)

    said = notes_of(trainer(disk=ScriptedDisk(look_then_fail)), capsys)
    assert "CHECKPOINT-4 WAS NOT WRITTEN (OSError: No space left on device)" in said
    assert "last whole: checkpoint-2; next try after step 5" in said
    # It is tried again, if not at once: the copies may have been under way.
    written = [step for step in checkpoints(Path("out")) if step in (5, 6, 7)]
    assert written and 2 in checkpoints(Path("out"))
    for path in checkpoints(Path("out")).values():
        verify(path)
    assert tensors_of(Path("out") / LAST) == tensors_of(Path("whole") / LAST)
    assert not list(Path("out").glob(".*writing"))


def test_a_disk_that_stays_full_ends_in_one_error_and_the_earlier_checkpoint(
    workspace: Path,
) -> None:
    def fails(what: str, path: Path) -> None:
        if what == "write" and ".checkpoint-" in str(path) and "-2." not in str(path):
            if "checkpoint-0" in str(path):
                return
            raise full()

    with pytest.raises(UserError, match="the model itself is written"):
        train(disk=ScriptedDisk(fails))
    assert list(checkpoints(Path("out"))) == [2]
    verify(Path("out/checkpoint-2"))
    assert (Path("out") / "model.safetensors.index.json").is_file()


def test_too_little_room_is_said_before_anything_is_loaded(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(ScriptedDisk):
        def free_bytes(self, path: Path) -> int:
            return 100_000_000

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    monkeypatch.setattr("megatrain.trainer.trainer.BlockStore", never)
    with pytest.raises(UserError, match=r"checkpoints of 64\.\d+ MiB.*room for 2 is needed"):
        trainer(disk=Small())
    assert trainer(disk=Small(), save_strategy="no").notes == []
    Small.free_bytes = lambda self, path: 140_000_000  # type: ignore[method-assign]
    (note,) = trainer(disk=Small()).notes
    assert "4 checkpoints of" in note and "set save_total_limit" in note


def test_a_run_that_goes_on_needs_room_for_what_rotation_leaves(workspace: Path) -> None:
    """Started again where it went on before with the same room: one is removed for each."""
    train(max_steps=4, save_total_limit=2)
    kept = list(checkpoints(Path("out")))

    class Small(ScriptedDisk):
        def free_bytes(self, path: Path) -> int:
            return 100_000_000  # of 2 x 67.5 MB

    keys: dict[str, Any] = {"resume_from_checkpoint": "auto", "disk": Small()}
    made = trainer(save_total_limit=len(kept), **keys)
    assert not any("checkpoints of" in note for note in made.notes)
    made.output._lock.release()
    for limit in (3, None):
        with pytest.raises(UserError, match="room for 2 is needed"):
            trainer(save_total_limit=limit, **keys)
    # Where there is a best one, it, the last and the next are there together.
    Small.free_bytes = lambda self, path: 140_000_000  # type: ignore[method-assign]
    keys |= {"output_dir": "new", "resume_from_checkpoint": None}
    for evaluates, told in (({}, 0), ({"eval_split": 4, "eval_steps": 2}, 1)):
        made = trainer(save_total_limit=1, **keys | evaluates)
        assert sum("3 checkpoints of" in note for note in made.notes) == told
        made.output._lock.release()


def test_a_disk_that_is_full_at_the_start_is_left_as_it_was(workspace: Path) -> None:
    with pytest.raises(UserError, match="no way to write there"):
        train(disk=ScriptedDisk(Full("checkpoint-0", what="close")))
    assert not list(Path("out").glob(".*writing"))


def test_an_output_directory_that_cannot_be_listed_ends_no_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [False]

    def listed(output: Path) -> dict[int, Path]:
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return checkpoints(output)

    def fails(what: str, path: Path) -> None:
        broken[0] = "checkpoint-4.writing" in str(path)
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("megatrain.trainer.saving.checkpoints", listed)
    said = notes_of(trainer(disk=ScriptedDisk(fails)), capsys)
    assert "CHECKPOINT-4 WAS NOT WRITTEN (OSError: Input/output error)" in said
    assert 8 in checkpoints(Path("out"))


def test_a_directory_that_vanishes_is_made_again(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def vanish(what: str, path: Path) -> None:
        if what == "create" and "checkpoint-6" in str(path) and Path("out/checkpoint-4").exists():
            shutil.rmtree("out")

    said = notes_of(trainer(disk=ScriptedDisk(vanish)), capsys)
    assert "CHECKPOINT-6 WAS NOT WRITTEN" in said and "last whole: none" in said
    assert LAST in [path.name for path in checkpoints(Path("out")).values()]
    verify(Path("out") / LAST)


def test_a_directory_without_right_to_write_is_one_error(workspace: Path) -> None:
    def refuse(what: str, path: Path) -> None:
        if what == "create":
            raise PermissionError(errno.EACCES, "Permission denied")

    made = trainer(disk=ScriptedDisk(refuse))
    with pytest.raises(UserError, match=r"no way to write there .Permission denied."):
        made.train()


def test_a_best_checkpoint_that_was_not_written_does_not_cost_the_one_before(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([2.0, 1.0, 3.0, 4.0])

    def scripted(*arguments: Any, **options: Any) -> EvalResult:
        return EvalResult(loss_sum=next(losses), supervised_tokens=1)

    monkeypatch.setattr(loop, "evaluate_rows", scripted)
    made = train(
        disk=ScriptedDisk(Full("checkpoint-4.writing", what="create")),
        eval_split=4,
        eval_steps=2,
        eval_on_start=False,
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    assert (made.progress.best_step, made.progress.best_loss) == (2, 2.0)
    assert list(checkpoints(Path("out"))) == [2, 8]
    final, best = (AutoModelForCausalLM.from_pretrained(p) for p in ("out", "out/checkpoint-2"))
    wanted = best.state_dict()
    assert all(torch.equal(t, wanted[n]) for n, t in final.state_dict().items())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = [
    "config.json",
    "tokenizer.json",
    "trainer_state.json",
    "model-00001-of-*.safetensors",
    "model.safetensors.index.json",
    "training_state/state.json",
    "training_state/config.yaml",
    "training_state/block-00001.safetensors",
    "training_state/manifest.json",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with two checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    context = pytest.MonkeyPatch()
    from tests.cli.conftest import workspace

    workspace.__wrapped__(folder, context)  # type: ignore[attr-defined]
    train(max_steps=4, output_dir=str(folder / "out"))
    context.undo()
    return folder / "out"


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_checkpoint_before_is_taken(
    name: str, harm: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (path,) = (out / "checkpoint-4").glob(name)
    harm(path)
    with pytest.raises(UserError, match="resume_from_checkpoint") as caught:
        verify(out / "checkpoint-4")
    assert path.name in str(caught.value)
    said: list[str] = []
    assert last_whole(out, said.append) == out / "checkpoint-2"
    if not (name.endswith("manifest.json") and harm is Path.unlink):
        assert "checkpoint-4 is passed over" in said[0]


def test_all_damaged_is_an_error_and_not_a_fresh_start(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    for folder in checkpoints(out).values():
        cut(folder / "config.json")
    with pytest.raises(UserError, match=r"config.json has \d+ bytes instead of \d+"):
        last_whole(out, lambda _: None)


@pytest.mark.parametrize("content", ["[]", '{"version": 1, "digest": "", "files": []}', "\0\0"])
def test_a_manifest_of_anything_else_is_damage(
    content: str, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "checkpoint-4/training_state/manifest.json").write_text(content)
    assert last_whole(out, lambda _: None) == out / "checkpoint-2"


def test_a_manifest_that_cannot_be_read_is_passed_over(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    read = Path.read_text

    def unreadable(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "manifest.json" and "checkpoint-4" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", unreadable)
    said: list[str] = []
    assert last_whole(out, said.append) == out / "checkpoint-2"
    assert "manifest.json cannot be read (Input/output error)" in said[0]


def test_another_version_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    path = out / "checkpoint-4/training_state/manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UserError, match="version 2 of the format, and a megatrain that reads 1"):
        verify(out / "checkpoint-4")


def test_a_model_alone_is_no_training_state(workspace: Path) -> None:
    train(save_only_model=True, max_steps=4)
    verify(Path("out/checkpoint-4"))
    assert not (Path("out/checkpoint-4/training_state") / "block-00001.safetensors").exists()
    with pytest.raises(UserError, match="without training state"):
        read_state(Path("out/checkpoint-4"))
    with pytest.raises(UserError, match="without training state"):
        trainer(resume_from_checkpoint="out/checkpoint-4", overwrite_output_dir=True)


def test_nothing_has_a_name_before_what_it_names_is_on_the_disk(workspace: Path) -> None:
    more = Path("models/base/additional_chat_templates")  # a tokenizer's files have a folder then
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ messages }}")
    disk = ScriptedDisk()
    train(disk=disk, max_steps=4, save_total_limit=1)
    out = Path("out").resolve()
    for step in (2, 4):
        final, folder = out / f"checkpoint-{step}", out / f".checkpoint-{step}.writing"
        named = disk.log.index(("rename", final))
        before, after = disk.log[:named], disk.log[named + 1 :]
        files = json.loads((out / "checkpoint-4/training_state/manifest.json").read_text())["files"]
        assert f"{more.name}/tool_use.jinja" in files
        for name in (*files, "training_state/manifest.json"):
            closed = _last(before, ("close", folder / name))
            parent = (folder / name).parent
            assert closed < _last(before, ("sync", parent)), name
            assert _last(before, ("write", folder / name), missing=-1) < closed, name
        assert ("sync", out) == after[0]
    removed = disk.log.index(("rename", out / ".checkpoint-2.removing"))
    assert removed > disk.log.index(("rename", out / "checkpoint-4")) + 1
    assert disk.log.index(("remove", out / ".checkpoint-2.removing")) > removed


def _last(log: list[tuple[str, Path]], entry: tuple[str, Path], missing: int | None = None) -> int:
    found = [index for index, each in enumerate(log) if each == entry]
    return found[-1] if missing is None else max([missing, *found])


def test_clocks_that_jump_change_no_order(workspace: Path) -> None:
    """The latest is the one of the highest step, whatever the files' dates say."""
    train(max_steps=6)
    for day, path in enumerate(reversed(checkpoints(Path("out")).values())):
        for file in (path, *path.rglob("*")):
            os.utime(file, (86400 * day, 86400 * day))
    assert last_whole(Path("out"), print) == Path("out/checkpoint-6")
    train(resume_from_checkpoint="auto", save_total_limit=2)
    assert list(checkpoints(Path("out"))) == [6, 8]


def test_preflight_knows_a_checkpoint_without_importing_its_room() -> None:
    assert preflight.MANIFEST == manifest.MANIFEST
