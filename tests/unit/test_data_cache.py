"""The token cache: the same rows as without it, found again, never stale, never in the way."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data import DataOptions, TokenizedRows, load_rows
from megatrain.data import cache as cache_module
from megatrain.data.cache import TokenCache, default_cache_dir
from megatrain.data.gather import GatheredFiles
from megatrain.data.source import Source
from megatrain.data.tokenise import Task
from megatrain.errors import UserError
from tests.tokenizers_for_tests import LLAMA3, byte_tokenizer

TOKENIZER: Any = byte_tokenizer()
OPTIONS = DataOptions(max_length=64)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records = [{"text": f"record {i} " * (1 + i % 9)} for i in range(700)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


class Counted:
    """How often anything was tokenised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        batch = Task.batch

        def counting(task: Task, *arguments: Any) -> Any:
            self.batches += 1
            return batch(task, *arguments)

        monkeypatch.setattr(Task, "batch", counting)

    def taken(self) -> int:
        batches, self.batches = self.batches, 0
        return batches


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "known"]


def assert_same(one: TokenizedRows, other: TokenizedRows) -> None:
    assert one.digest == other.digest
    assert one.stats == other.stats
    for first, second in zip(one, other, strict=True):
        assert np.array_equal(first.input_ids, second.input_ids)
        assert np.array_equal(first.weights, second.weights)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_rows_digest_and_counts_are_those_without_a_cache(
    processes: int, data: Path, tmp_path: Path, counted: Counted
) -> None:
    plain = load_rows(data, TOKENIZER, OPTIONS, processes=1)
    cache = TokenCache(tmp_path / "cache")
    assert_same(load_rows(data, TOKENIZER, OPTIONS, cache=cache, processes=processes), plain)
    counted.taken()
    found = load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache"))
    assert counted.taken() == 0
    assert_same(found, plain)
    assert not list(tmp_path.glob("cache/*.unfinished"))


def test_rows_asked_for_are_copies_of_what_is_mapped(data: Path, tmp_path: Path) -> None:
    for _ in range(2):
        rows = load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache"))
        rows[0].input_ids[:] = 0
        rows[0].weights[:] = 0
        assert rows[0].input_ids.all() and rows[0].weights.all()


def test_whatever_the_rows_depend_on_makes_another_entry(
    data: Path, tmp_path: Path, counted: Counted
) -> None:
    folder = tmp_path / "cache"

    def load(path: Path = data, tokenizer: Any = TOKENIZER, **options: Any) -> bool:
        """Whether anything was tokenised."""
        chosen = DataOptions(**{"max_length": 64} | options)
        load_rows(path, tokenizer, chosen, cache=TokenCache(folder))
        return counted.taken() > 0

    assert load() and not load()
    assert load(max_length=63)
    assert load(text_end_of_sequence=False)
    assert load(excess_length_strategy="drop")
    assert load(tokenizer=byte_tokenizer(LLAMA3))
    larger = byte_tokenizer()
    larger.add_tokens(["record"])
    assert load(tokenizer=larger)
    assert not load(tokenizer=byte_tokenizer())  # another object, the same content
    # What a model lacks makes no other rows.
    assert not load(vocab_size=1000) and not load(max_positions=64)
    moved = tmp_path / "elsewhere" / "other.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(data.read_bytes())
    assert not load(moved)
    moved.rename(moved.with_suffix(".txt"))
    assert load(moved.with_suffix(".txt"))  # the same bytes, read in another way


def test_a_file_changed_in_place_is_seen_although_its_size_and_time_are_the_same(
    data: Path, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "SETTLED_SECONDS", -1.0)  # the digest is remembered at once
    folder = tmp_path / "cache"
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))
    assert len(list((folder / "known").iterdir())) == 1
    before = data.stat()
    with data.open("r+b") as file:
        file.seek(10)
        file.write(b"R")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert data.stat().st_mtime_ns == before.st_mtime_ns
    counted.taken()
    rows = load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))
    assert counted.taken()
    assert TOKENIZER.decode(rows[0].input_ids).startswith("R")


def test_an_unchanged_file_is_not_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = time.time() - 100
    folder = tmp_path / "cache"
    monkeypatch.setattr(cache_module, "SETTLED_SECONDS", -1.0)
    os.utime(data, (old, old))
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))

    def never(*_: Any) -> Any:
        raise AssertionError

    tokenizer_digest = cache_module._tokenizer_digest(TOKENIZER)
    code_digest = cache_module._code_digest()
    monkeypatch.setattr(cache_module, "_tokenizer_digest", lambda _: tokenizer_digest)
    monkeypatch.setattr(cache_module, "_code_digest", lambda: code_digest)
    monkeypatch.setattr(cache_module, "_file_digest", never)
    monkeypatch.setattr(cache_module, "digest_of_files", never)
    monkeypatch.setattr("megatrain.data.source.read_records", never)
    assert load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder)).digest


def test_a_file_that_has_just_changed_is_not_remembered(data: Path, tmp_path: Path) -> None:
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache"))
    assert not (tmp_path / "cache" / "known").exists()


def flip(path: Path, offset: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: flip(entry / "input_ids"),
        lambda entry: flip(entry / "weights"),
        lambda entry: flip(entry / "offsets"),
        lambda entry: flip(entry / "manifest.json", 60),
        lambda entry: os.truncate(entry / "input_ids", 100),
        lambda entry: os.truncate(entry / "offsets", 0),
        lambda entry: os.truncate(entry / "manifest.json", 30),
        lambda entry: (entry / "manifest.json").write_text("[]"),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: (entry / "weights").unlink(),
    ],
)
def test_a_damaged_entry_is_found_out_and_made_again(
    damage: Any, data: Path, tmp_path: Path, counted: Counted
) -> None:
    folder = tmp_path / "cache"
    whole = load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))
    digest = whole.digest
    (entry,) = entries(folder)
    damage(entry)
    counted.taken()
    notes: list[str] = []
    again = load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder, notes.append))
    assert counted.taken() and not notes
    assert again.digest == digest
    assert entries(folder) == [entry]
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))
    assert not counted.taken()


def test_a_copied_entry_is_compared_and_taken(data: Path, tmp_path: Path, counted: Counted) -> None:
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache"))
    for path in entries(tmp_path / "cache")[0].iterdir():
        os.utime(path, (0, 0))
    counted.taken()
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache"))
    assert not counted.taken()


def test_a_folder_that_cannot_be_made_costs_one_notice(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    cache = TokenCache(tmp_path / "file" / "cache", notes.append)
    for _ in range(2):
        rows = load_rows(data, TOKENIZER, OPTIONS, cache=cache)
        assert_same(rows, load_rows(data, TOKENIZER, OPTIONS))
    assert len(notes) == 1
    assert "rows are kept in memory" in notes[0] and "dataset_cache_dir" in notes[0]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_disk_that_fills_up_loses_no_row(
    fails_at: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = GatheredFiles.take
    taken: list[None] = []

    def full(files: GatheredFiles, chunk: Any) -> None:
        if len(taken) == fails_at:
            files._files["input_ids"].write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(None)
        take(files, chunk)

    monkeypatch.setattr(GatheredFiles, "take", full)
    notes: list[str] = []
    cache = TokenCache(tmp_path / "cache", notes.append)
    rows = load_rows(data, TOKENIZER, OPTIONS, cache=cache)
    assert_same(rows, load_rows(data, TOKENIZER, OPTIONS))
    assert len(notes) == 1 and "No space left" in notes[0]
    assert not entries(tmp_path / "cache")


def test_a_disk_that_fills_up_at_the_very_end_loses_no_row(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "_write_whole", full)
    notes: list[str] = []
    rows = load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache", notes.append))
    assert_same(rows, load_rows(data, TOKENIZER, OPTIONS))
    assert len(notes) == 1
    assert not entries(tmp_path / "cache")


def test_a_file_that_changes_while_it_is_read_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Task.batch

    def writing(task: Task, *arguments: Any) -> Any:
        with data.open("a") as file:
            file.write("\n")
        return batch(task, *arguments)

    monkeypatch.setattr(Task, "batch", writing)
    with pytest.raises(UserError, match=r"data\.jsonl: a file that changed while it was read"):
        load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(tmp_path / "cache"))
    assert not entries(tmp_path / "cache")


def test_two_at_once_leave_one_entry(data: Path, tmp_path: Path) -> None:
    found: list[TokenizedRows] = []

    def load() -> None:
        cache = TokenCache(tmp_path / "cache")
        found.append(load_rows(data, TOKENIZER, OPTIONS, cache=cache))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({rows.digest for rows in found}) == 1
    assert len(entries(tmp_path / "cache")) == 1
    assert_same(found[0], found[-1])


def test_remains_of_a_killed_run_are_removed_when_they_are_old(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for name, age in (("old", 2 * 24 * 3600), ("young", 60)):
        remains = folder / f"{name}.unfinished"
        remains.mkdir(parents=True)
        (remains / "input_ids").write_bytes(b"x")
        for path in (remains / "input_ids", remains):
            os.utime(path, (time.time() - age, time.time() - age))
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))
    assert [path.name for path in folder.glob("*.unfinished")] == ["young.unfinished"]


def test_an_entry_that_nothing_has_opened_for_long_is_removed(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    def load(max_length: int) -> None:
        options = DataOptions(max_length=max_length)
        load_rows(data, TOKENIZER, options, cache=TokenCache(folder))

    def grow_old(paths: list[Path]) -> None:
        for path in paths:
            os.utime(path / "manifest.json", (time.time() - 31 * 24 * 3600,) * 2)

    strange = folder / "mine"
    strange.mkdir(parents=True)
    (strange / "manifest.json").write_text("{}")
    load(64), load(32)
    first = {entry for entry in entries(folder) if entry != strange}
    grow_old([*first, strange])
    load(64)  # opened, it is young again
    load(16)
    left = set(entries(folder))
    assert strange in left and len(left) == 3 and len(left & first) == 1
    load(64)
    assert set(entries(folder)) == left


def test_tokens_that_a_model_lacks_are_named_by_place_from_the_cache_too(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    load_rows(data, TOKENIZER, OPTIONS, cache=TokenCache(folder))
    for options, message in (
        ({"vocab_size": 200}, r"data\.jsonl:1: token 256, and a model that has 200"),
        ({"max_positions": 20}, r"tokens of .*data\.jsonl:3 as one row"),
    ):
        chosen = DataOptions(max_length=64, **options)
        with pytest.raises(UserError, match=message):
            load_rows(data, TOKENIZER, chosen, cache=TokenCache(folder))
    assert len(entries(folder)) == 1


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/megatrain/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "megatrain" / "tokens"


@pytest.mark.parametrize("processes", [1, 3])
def test_the_first_mistake_is_told_however_many_processes(processes: int, tmp_path: Path) -> None:
    lines = ['{"text": "a"}'] * 1500
    lines[400], lines[800], lines[402] = '{"txt": 1}', "no JSON", "no JSON either"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:401: no such column") as caught:
        load_rows(tmp_path / "a.jsonl", TOKENIZER, OPTIONS, processes=processes)
    assert caught.value.change


def test_a_killed_process_is_one_error(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Task, "batch", killed)
    with pytest.raises(UserError, match=r"one of them was killed.*dataset_num_proc"):
        load_rows(data, TOKENIZER, OPTIONS, processes=2)


@pytest.mark.process
def test_processes_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from megatrain.data import DataOptions, load_rows
from megatrain.data.tokenise import Task
from tests.tokenizers_for_tests import byte_tokenizer
def slow(*_):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
Task.batch = slow
(Path(sys.argv[1]) / "a.txt").write_text("a")
load_rows(Path(sys.argv[1]) / "a.txt", byte_tokenizer(), DataOptions(), processes=2)
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    workers: list[int] = []
    while not workers:
        assert parent.poll() is None
        workers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            return
        time.sleep(0.1)
    raise AssertionError(workers)


def test_records_that_are_in_no_file_are_never_taken_from_the_cache(
    tmp_path: Path, counted: Counted
) -> None:
    """As of a dataset that its library holds in memory: another may bear the same name and size."""
    cache, found = TokenCache(tmp_path / "cache"), []
    for text in ("the first text", "another text!!"):
        source = Source(
            name="held in memory",
            files=(),
            variant={"split": "train", "rows": 1},
            read=lambda text=text: [{"text": text}],
        )
        found.append(load_rows(source, TOKENIZER, OPTIONS, cache=cache))
        assert counted.taken() == 1
    assert found[0].digest != found[1].digest
    assert not cache.folder.exists()
