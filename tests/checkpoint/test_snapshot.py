"""A snapshot is the state of its moment, however training and the disk race, in little memory."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from megatrain.checkpoint import (
    BufferPool,
    Contents,
    Snapshot,
    masters_of,
    restore_state,
    save_model,
)
from megatrain.checkpoint.contents import (
    STATE_FOLDER,
    STATE_PURPOSES,
    state_file,
    state_name,
)
from megatrain.checkpoint.disk import Data, Disk, DiskFile
from megatrain.checkpoint.tensors import TensorFiles
from megatrain.engine import Engine, EngineOptions
from megatrain.layout import BlockLayout, ParamSpec, Purpose
from megatrain.memory import BlockStore, DiskTier
from tests.numerics.harness import (
    ADAMW,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
)

from .runs import ScriptedDisk, full

ROWS = [make_rows(4, seed) for seed in range(4)]
PURPOSES = (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)


def engine_of(name: str = "llama", *, disk: DiskTier | None = None, **changes: Any) -> Engine:
    config = make_config(name)
    masters = {n: p.detach().clone() for n, p in reference_model(config).named_parameters()}
    options = EngineOptions(adamw=ADAMW, host_threads=1, micro_batch_rows=2, **changes)
    return make_engine(config, masters, options=options, compute_dtype="bfloat16", disk=disk)


def contents_of(engine: Engine) -> Contents:
    order = range(len(engine.model.blocks))
    return Contents.planned(
        engine.model,
        max_shard_bytes=30_000,
        order=order if engine.plan.clip else order[::-1],
        with_state=True,
    )


def snapshot(engine: Engine, folder: Path, disk: ScriptedDisk, pool_bytes: int = 2**13) -> Snapshot:
    (folder / STATE_FOLDER).mkdir(parents=True)
    contents = contents_of(engine)
    made = Snapshot(
        contents=contents,
        weights=engine.store.weights,
        store=engine.store,
        files=TensorFiles(disk, folder, contents.files),
        pool=BufferPool(pool_bytes, pin=False),
        complete=lambda: "",
        undo=lambda: None,
    )
    engine.before_update = made.guard
    return made


def moment(engine: Engine) -> dict[str, Tensor]:
    """Masters and moments, copied."""
    return {
        f"{purpose} {name}": tensor.clone()
        for purpose in PURPOSES
        for name, tensor in engine_state(engine, purpose).items()
    }


def written(engine: Engine, folder: Path) -> dict[str, Tensor]:
    """The same as it stands in the files."""
    found: dict[str, Tensor] = {}
    by_name: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            by_name |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    store = BlockStore(engine.store.layouts, device=torch.device("cpu"))
    for block in engine.model.blocks:
        names = [param.name for param in block.layout.params]
        store.write(block.index, {name: by_name[name] for name in names})
    restore_state(store, engine.model, folder)
    for block in engine.model.blocks:
        masters = store.masters(block.index)
        found |= {f"{Purpose.WEIGHT} {name}": tensor for name, tensor in masters.items()}
        for purpose in PURPOSES[1:]:
            moments = store.moments(block.index, purpose)
            found |= {f"{purpose} {name}": tensor for name, tensor in moments.items()}
    return found


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["no_clip", "clip"])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("on_disk", [(), (1, 3), (0, 1, 2, 3, 4)], ids=["memory", "some", "disk"])
def test_updates_wait_until_a_block_is_copied(
    max_grad_norm: float, threads: bool, on_disk: tuple[int, ...], tmp_path: Path
) -> None:
    """The disk writes nothing until training asks to overwrite a block: then it must wait."""
    waiting = "bfloat16" if max_grad_norm else None
    disk = DiskTier(blocks=frozenset(on_disk), path=tmp_path, gradient_dtype=waiting)
    engine = engine_of(max_grad_norm=max_grad_norm, threads=threads, disk=disk if on_disk else None)
    for rows in ROWS[:2]:
        engine.step(rows, learning_rate=1e-2)
    expected = moment(engine)
    asked = threading.Event()

    def late(what: str, path: Path) -> None:
        if what == "write":
            assert asked.wait(60)

    made = snapshot(engine, tmp_path / "at", ScriptedDisk(late))

    def guard(block: int) -> None:
        assert asked.is_set() or not made.ended
        asked.set()
        made.guard(block)

    engine.before_update = guard
    for rows in ROWS[2:]:
        engine.step(rows, learning_rate=1e-2)
    engine.flush()
    made.join()
    assert made.error is None and made.waited_s > 0
    assert same_bits(written(engine, tmp_path / "at"), expected)
    assert not same_bits(moment(engine), expected)
    undisturbed = engine_of(max_grad_norm=max_grad_norm, threads=threads)
    for rows in ROWS:
        undisturbed.step(rows, learning_rate=1e-2)
    assert same_bits(moment(engine), moment(undisturbed))


def test_with_room_for_all_nothing_waits_for_the_disk(tmp_path: Path) -> None:
    engine = engine_of()
    engine.step(ROWS[0], learning_rate=1e-2)
    expected, trained = moment(engine), threading.Event()

    def late(what: str, path: Path) -> None:
        if what == "write":
            assert trained.wait(60)

    nbytes = 2 * contents_of(engine).nbytes
    made = snapshot(engine, tmp_path / "at", ScriptedDisk(late), pool_bytes=nbytes)
    for rows in ROWS[1:]:
        engine.step(rows, learning_rate=1e-2)
    engine.flush()
    trained.set()
    made.join()
    assert made.error is None
    assert same_bits(written(engine, tmp_path / "at"), expected)


class SlowDisk(Disk):
    """Takes so many bytes a second, whatever the machine's own disk does."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def create(self, path: Path) -> DiskFile:
        return _SlowFile(path, self._bytes_per_s)


class _SlowFile(DiskFile):
    def __init__(self, path: Path, bytes_per_s: float) -> None:
        super().__init__(path)
        self._bytes_per_s = bytes_per_s

    def write(self, data: Data) -> None:
        ends = time.perf_counter() + memoryview(data).nbytes / self._bytes_per_s
        super().write(data)
        time.sleep(max(0.0, ends - time.perf_counter()))


@pytest.mark.parametrize("share", [0.1, 0.4, 1.2])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_training_waits_as_long_as_is_predicted(
    share: float, num_lanes: int, tmp_path: Path
) -> None:
    """Blocks are overwritten at once, by one lane or by two: max(0, bytes - pool) / rate.

    The rate is that of the whole save, which has the machine's own disk in it too.
    """
    engine = engine_of()
    engine.step(ROWS[0], learning_rate=1e-2)
    engine.flush()
    contents = contents_of(engine)
    folder = tmp_path / "at"
    (folder / STATE_FOLDER).mkdir(parents=True)
    pool = BufferPool(round(share * contents.nbytes), pin=False)
    made = Snapshot(
        contents=contents,
        weights=engine.store.weights,
        store=engine.store,
        files=TensorFiles(SlowDisk(contents.nbytes / 1.5), folder, contents.files),
        pool=pool,
        complete=lambda: "",
        undo=lambda: None,
    )

    def lane(number: int) -> None:
        for block in contents.order[number::num_lanes]:
            made.guard(block)

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(num_lanes)]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    made.join()
    expected = max(0, contents.nbytes - pool.nbytes) / contents.nbytes * made.seconds
    # 5 %: a buffer is free again only when all of it is written.
    assert made.waited_s == pytest.approx(expected, rel=0.1, abs=0.05 * made.seconds)


@pytest.mark.parametrize("what", ["create", "write", "close"])
def test_a_disk_that_fails_sets_training_free(what: str, tmp_path: Path) -> None:
    engine = engine_of()
    engine.step(ROWS[0], learning_rate=1e-2)
    engine.flush()
    count = [3]

    def fail(done: str, path: Path) -> None:
        count[0] -= done == what
        if done == what and count[0] < 0:
            raise full()

    made = snapshot(engine, tmp_path / "at", ScriptedDisk(fail))
    for rows in ROWS[1:]:
        engine.step(rows, learning_rate=1e-2)
    engine.flush()
    made.join()
    assert isinstance(made.error, OSError)


def test_the_model_is_not_walked_while_pieces_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps replace its layers by recorders, which have neither their buffers nor conversions."""
    engine = engine_of("mixtral")
    engine.model.hf_model.register_buffer("extra", torch.arange(3.0))
    contents = contents_of(engine)
    pieces = contents.pieces(engine.store.weights, engine.store)

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("walked")

    for name in ("named_parameters", "state_dict", "named_buffers", "named_modules"):
        monkeypatch.setattr(type(engine.model.hf_model), name, never)
    written = {path for _, (path, _) in pieces}
    assert written == set(contents.files)


def test_a_file_that_is_not_complete_is_no_checkpoint(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.checkpoint import checkpoints, verify
    from tests.checkpoint.runs import train

    whole = Contents._pieces

    def cut(self: Contents, *arguments: Any) -> Iterator[Any]:
        yield from list(whole(self, *arguments))[:-1]

    monkeypatch.setattr(Contents, "_pieces", cut)
    with pytest.raises(Exception, match="no way to write it"):
        train(max_steps=2, save_steps=1)
    assert checkpoints(Path("out")) == {}
    monkeypatch.undo()
    monkeypatch.chdir(workspace)
    train(max_steps=2, save_steps=1, overwrite_output_dir=True)
    for path in checkpoints(Path("out")).values():
        verify(path)


def test_what_is_read_from_blocks_in_any_order_is_refused(tmp_path: Path) -> None:
    engine = engine_of()
    save_model(engine.model, engine.store.masters, tmp_path / "model", dtype="float32")
    read = masters_of(engine.model, tmp_path / "model")
    read(0)
    with pytest.raises(AssertionError, match="in their order"):
        read(2)


@contextmanager
def peak_of_private_memory() -> Iterator[Callable[[], int]]:
    """Bytes beyond what this process had at the beginning, at their peak."""

    def private() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) * 1024

    before, peak, done = private(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], private() - before)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        watcher.join()


def test_saving_and_loading_take_two_blocks_of_memory(tmp_path: Path) -> None:
    """Ten blocks of 24 MB of state; the allocator is given a tenth of a block."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama",
        hidden_size=256,
        intermediate_size=2560,
        num_hidden_layers=10,
        num_attention_heads=4,
        vocab_size=8192,
    )
    model = reference_model(config)
    masters = {name: param.detach() for name, param in model.named_parameters()}
    engine = make_engine(config, masters, compute_dtype="bfloat16")
    block = max(
        sum(b.layout.nbytes(p) for p in (Purpose.WEIGHT, *STATE_PURPOSES))
        for b in engine.model.blocks
    )
    assert block > 20e6
    pool = BufferPool(2 * block, pin=False)
    contents = contents_of(engine)
    folder = tmp_path / "at"
    (folder / STATE_FOLDER).mkdir(parents=True)
    with peak_of_private_memory() as peak:
        made = Snapshot(
            contents=contents,
            weights=engine.store.weights,
            store=engine.store,
            files=TensorFiles(ScriptedDisk(), folder, contents.files),
            pool=pool,
            complete=lambda: "",
            undo=lambda: None,
        )
        made.join()
    assert made.error is None
    assert peak() < 2.1 * block
    store = BlockStore(engine.store.layouts, device=torch.device("cpu"))
    store.slab._bytes.zero_()  # its pages are there
    with peak_of_private_memory() as peak:
        restore_state(store, engine.model, folder)
    assert peak() < 1.1 * block


def test_state_files_hold_every_trained_parameter_once() -> None:
    specs = [
        ParamSpec(name="a", shape=(3, 5), dtype="bfloat16", trainable=True, decayed=True),
        ParamSpec(name="b", shape=(), dtype="float32", trainable=True, decayed=False),
        ParamSpec(name="c", shape=(7,), dtype="bfloat16", trainable=False, decayed=True),
    ]
    layout = BlockLayout.build(specs)
    from megatrain.checkpoint.contents import _state_plan

    plan = _state_plan(layout)
    assert [spec.name for spec in plan.tensors] == [
        state_name(purpose, name)
        for purpose, names in (
            (Purpose.EXP_AVG, "ab"),
            (Purpose.EXP_AVG_SQ, "ab"),
            (Purpose.RESIDUAL, "a"),
        )
        for name in names
    ]
    assert plan.nbytes == len(plan.header) + 2 * 16 * 4 + 15 * 2
    assert state_file(3) == "training_state/block-00003.safetensors"
