"""A checkpoint that transformers wrote, through the blocks, and back into transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import save_model
from megatrain.models import build_on_meta, read_config, split_model
from megatrain.models.weights import LoadReport, load_block_weights

from ..numerics.harness import reference_model

NOT_READ_BACK = "transformers does not read back what it saves itself"


def check_round_trip(config: Any, folder: Path) -> str:
    """Every parameter and saved buffer comes back, under its name, bit for bit.

    Returns:
        `NOT_READ_BACK`, or nothing.

    Raises:
        AssertionError: if one does not.
    """
    model = reference_model(config)
    generator = torch.Generator().manual_seed(1)
    for tensor in model.state_dict().values():  # so that no two norms or biases are alike
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.add_(0.01 * noise.to(tensor.dtype))
    model.save_pretrained(folder / "before", max_shard_size="100KB")
    try:
        expected, info = _load(folder / "before")
    except (RuntimeError, ValueError):
        return NOT_READ_BACK
    if any(info.values()):
        return NOT_READ_BACK
    blocks = split_model(
        build_on_meta(read_config(folder / "before"), compute_dtype="float32"),
        compute_dtype="float32",
    )
    report = LoadReport()
    source = load_block_weights(blocks, folder / "before", report)
    loaded = {index: dict(tensors) for index, tensors in source}  # each is emptied after its turn
    assert not report.missing and not report.unexpected, report
    found = {name: tensor for tensors in loaded.values() for name, tensor in tensors.items()}
    assert found.keys() == dict(expected.named_parameters()).keys()
    _same(found, dict(expected.named_parameters()), "loaded")
    save_model(blocks, loaded.__getitem__, folder / "after", dtype="float32")
    again, info = _load(folder / "after")
    assert not any(info.values()), info
    _same(dict(again.state_dict()), dict(expected.state_dict()), "saved")
    _check_kept_in_fp32(folder / "after")
    return ""


def _check_kept_in_fp32(path: Path) -> None:
    """In a bfloat16 run the same parameters stay in fp32 as where transformers loads them."""
    model, _ = _load(path, torch.bfloat16)
    blocks = split_model(
        build_on_meta(read_config(path), compute_dtype="bfloat16"), compute_dtype="bfloat16"
    )
    mine = {
        placed.name: getattr(torch, segment.dtype)
        for block in blocks.blocks
        for segment in block.layout.segments
        for placed in segment.params
    }
    assert mine == {name: param.dtype for name, param in model.named_parameters()}


def _load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    return model, info


def _same(mine: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), f"{what}: {name}"
