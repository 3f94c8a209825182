"""Masters come back as they were given, whatever they were given as."""

import pytest
import torch
from torch import Tensor

from megatrain.layout import BlockLayout, ParamSpec
from megatrain.memory import BlockStore

SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (5, 7),
    "scalar": (),
    "empty": (0, 3),
    "turned": (4, 6),
}


def sources(device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    drawn = {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}
    return drawn | {"turned": torch.randn(6, 4, device=device).T}


def written(tensors: dict[str, Tensor], device: str, monkeypatch: pytest.MonkeyPatch) -> BlockStore:
    """In a store on a device, in pieces of which the last is shorter."""
    monkeypatch.setattr("megatrain.memory.store.WRITE_PIECE", 8)
    specs = [
        ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=True, decayed=True)
        for name, shape in SHAPES.items()
    ]
    resident = frozenset[int]() if device == "cpu" else frozenset({0})
    layouts = [BlockLayout.build(specs)]
    store = BlockStore(layouts, device=torch.device(device), resident=resident)
    store.write(0, tensors)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_masters_are_exact(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in sources("cpu").items()}
    masters = written(tensors, "cpu", monkeypatch).masters(0)
    assert masters.keys() == SHAPES.keys()
    for name, tensor in tensors.items():
        assert torch.equal(masters[name], tensor.float())
