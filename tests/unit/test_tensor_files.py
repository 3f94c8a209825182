"""Files that we write as safetensors are what the library reads, whatever their tensors."""

import errno
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatrain.checkpoint.contents import _state_plan, _state_tensors, shape_of
from megatrain.checkpoint.disk import Disk, record_of
from megatrain.checkpoint.tensors import (
    Shards,
    TensorFiles,
    TensorSpec,
    bytes_of,
    data_of,
    index_of,
)
from megatrain.layout import BlockLayout, ParamSpec
from megatrain.memory import BlockStore

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool]


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 300),
    st.integers(1, 50),
)
def test_what_is_written_is_read_by_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    forms: list[tuple[torch.dtype, list[int]]],
    max_bytes: int,
    part: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {f"t{i}": tensor_of(*form, seed=i) for i, form in enumerate(forms)}
    shards = Shards(max_bytes=max_bytes)
    for name, tensor in tensors.items():
        shards.add(TensorSpec.of(name, tensor))
    plans = shards.plans()
    place = {spec.name: name for name, plan in plans.items() for spec in plan.tensors}
    files = TensorFiles(Disk(), folder, plans)
    for name, tensor in tensors.items():
        for piece in bytes_of(tensor).split(part):  # one of an empty tensor too
            files.write(place[name], data_of(piece))
    assert files.records.keys() == plans.keys()
    for name, plan in plans.items():
        path = folder / name
        assert path.stat().st_size == plan.nbytes
        assert record_of(path) == files.records[name]
        assert len(plan.tensors) == 1 or sum(spec.nbytes for spec in plan.tensors) <= max_bytes
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {spec.name for spec in plan.tensors}
            for spec in plan.tensors:
                found = file.get_tensor(spec.name)
                assert found.dtype is spec.dtype and torch.equal(found, tensors[spec.name])
    assert index_of(plans).count(b"safetensors") == len(tensors)


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    Disk().write(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        Disk().write(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"


def test_large_writes_are_sent_to_the_disk_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.checkpoint.disk.SYNC_BYTES", 100)
    file = Disk().create(tmp_path / "a")
    for _ in range(10):
        file.write(b"x" * 64)
    assert file.close() == record_of(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size == 640


@pytest.mark.parametrize("then", ["write", "close"])
def test_what_cannot_be_sent_to_the_disk_on_the_way_is_no_file(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells it once, in the thread that sends."""

    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("megatrain.checkpoint.disk.SYNC_BYTES", 100)
    monkeypatch.setattr(os, "fdatasync", fail)
    file = Disk().create(tmp_path / "a")
    file.write(b"x" * 100)
    calls = {"write": partial(file.write, b"x" * 100), "close": file.close}
    with pytest.raises(OSError, match="Input/output error"):
        calls[then]()
    monkeypatch.undo()  # from here on all goes well, and what was lost stays lost
    with pytest.raises(OSError, match="Input/output error"):
        file.close()
    file.abandon()


def test_one_file_has_the_single_name_and_more_have_numbers() -> None:
    shards = Shards(max_bytes=8)
    shards.add(TensorSpec(name="a", dtype=torch.float32, shape=(2,)))
    assert list(shards.plans()) == ["model.safetensors"]
    shards.add(TensorSpec(name="b", dtype=torch.float32, shape=(1,)))
    assert list(shards.plans()) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def test_state_of_any_shape_is_planned_as_it_is_given() -> None:
    """Scalars and empty tensors too."""
    shapes: dict[str, tuple[int, ...]] = {"a": (), "b": (0, 3), "c": (5,), "d": (2, 3)}
    specs = [
        ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=True, decayed=True)
        for name, shape in shapes.items()
    ]
    layout = BlockLayout.build(specs)
    store = BlockStore([layout], device=torch.device("cpu"))
    block = SimpleNamespace(layout=layout)
    model: Any = SimpleNamespace(
        blocks_of=lambda whole: [whole], whole=SimpleNamespace(blocks=[block])
    )
    found = [
        TensorSpec(name=name, dtype=parts[0].dtype, shape=shape_of(parts))
        for name, parts in _state_tensors(store, model, 0)
    ]
    assert tuple(found) == _state_plan(layout).tensors
