"""GGUF files: every master is what the file's bytes mean, or the file is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.errors import UserError
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models import gguf as gguf_room
from megatrain.models.gguf import GgufSource
from megatrain.models.weights import LoadReport, load_block_weights

from .gguf_files import write_gguf
from .harness import SMALL, reference_model
from .test_quantised import check_saved, masters_of
from .test_weights import fill

OPTIONS: dict[str, Any] = {**SMALL, "intermediate_size": 64, "vocab_size": 96}
MOE: dict[str, Any] = {
    **OPTIONS,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {**OPTIONS, "tie_word_embeddings": False}, {}),
    "llama_tied": ("llama", "llama", {**OPTIONS, "tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", "qwen2", OPTIONS, {}),
    "qwen3_moe": (
        "qwen3_moe",
        "qwen3moe",
        MOE,
        {
            "qwen3moe.attention.key_length": 8,
            "qwen3moe.expert_count": 4,
            "qwen3moe.expert_used_count": 2,
        },
    ),
}
"""Name -> model type, GGUF architecture, config, further keys of the header."""
# transformers does not read this key from the header, so the user has to give it.
OVERRIDES: dict[str, dict[str, Any]] = {"qwen3_moe": {"moe_intermediate_size": 64}}


def write(name: str, path: Path, **changes: Any) -> dict[str, Tensor]:
    model_type, architecture, options, header = MODELS[name]
    model = reference_model(AutoConfig.for_model(model_type, **options))
    more = header | changes.pop("header", {})
    return write_gguf(path, model, architecture, header=more, **changes)


def blocks_of(path: Path, dtype: str = "float32", **overrides: Any) -> BlockModel:
    config = read_config(path.parent, gguf_file=path.name, overrides=overrides)
    return split_model(build_on_meta(config, compute_dtype=dtype), compute_dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_masters_are_what_the_bytes_mean(name: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    expected = write(name, path)
    model = blocks_of(path, dtype, **OVERRIDES.get(name, {}))
    store, report = fill(model, path)
    assert report.missing == [] and report.unexpected == []
    mine = masters_of(model, store)
    assert mine.keys() == expected.keys()
    for full_name, tensor in expected.items():
        assert torch.equal(mine[full_name], tensor), full_name
    check_saved(model, store, tmp_path / "out", expected)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_it_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "m.gguf")
    model = blocks_of(tmp_path / "m.gguf")
    store, _ = fill(model, tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    for full_name, tensor in masters_of(model, store).items():
        assert torch.equal(tensor, theirs.get_parameter(full_name)), full_name


@pytest.mark.parametrize(
    ("header", "extra", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, {}, "rope scaling 'yarn'"),
        ({}, {"rope_freqs.weight": np.full(4, 2.0, np.float32)}, "in the model for rope_freqs"),
        ({}, {"blk.0.odd.weight": np.ones((32, 32), np.float32)}, r"for blk\.0\.odd\.weight"),
        ({"split.count": 3}, {}, "one of 3 parts.*gguf-split --merge"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    header: dict[str, Any], extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write("llama", path, header=header, extra=extra)
    with pytest.raises(UserError, match=message):
        fill(blocks_of(path), path)


def test_rope_that_the_user_gives_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    factors = {"rope_freqs.weight": np.full(4, 2.0, np.float32)}
    write("llama", path, extra=factors)
    rope = {"rope_type": "linear", "factor": 2.0}
    _, report = fill(blocks_of(path, rope_parameters=rope), path)
    assert report.unexpected == []


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write("llama", path, extra={"rope_freqs.weight": np.ones(4, np.float32)})
    _, report = fill(blocks_of(path), path)
    assert report.unexpected == []


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = reference_model(AutoConfig.for_model("llama", **OPTIONS))
    write_gguf(path, model, "rwkv7")
    with pytest.raises(UserError, match="rwkv7"):
        blocks_of(path)


def test_a_model_that_transformers_reads_in_another_way_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write("qwen2", path)
    config = AutoConfig.for_model("qwen3_5_text", **OPTIONS)
    model = build_on_meta(config, compute_dtype="float32")
    with pytest.raises(UserError, match=r"cannot be read one by one .*qwen3_5_text"):
        GgufSource(path, model)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write("llama", path)
    whole = path.read_bytes()
    model = blocks_of(path)
    path.write_bytes(whole[: len(whole) - 5000])
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        fill(model, path)
    path.write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"m\.gguf"):
        blocks_of(path)


def test_without_the_package_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("llama", tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_room, "is_gguf_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'megatrain\[gguf\]'"):
        blocks_of(tmp_path / "m.gguf")


def test_one_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write("qwen3_moe", path)
    alive: dict[StorageWeakRef, int] = {}
    peak = 0
    read = GgufSource.read

    def watched_read(self: GgufSource, key: str) -> Tensor:
        nonlocal peak
        tensor = read(self, key)
        storage = tensor.untyped_storage()
        alive[StorageWeakRef(storage)] = storage.nbytes()
        peak = max(peak, sum(n for reference, n in alive.items() if not reference.expired()))
        return tensor

    monkeypatch.setattr(GgufSource, "read", watched_read)
    model = blocks_of(path, **OVERRIDES["qwen3_moe"])
    held = [tensors for _, tensors in load_block_weights(model, path, LoadReport())]
    assert held == [{}] * len(model.blocks)
    largest = max(4 * block.layout.num_params for block in model.blocks)
    assert largest < 2 * model.num_params
    assert largest / 2 < peak <= 1.05 * largest
