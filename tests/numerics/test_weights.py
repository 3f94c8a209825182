"""Checkpoints in, checkpoints out: what transformers wrote is what it reads back."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.checkpoint import save_model
from megatrain.errors import UserError
from megatrain.memory import BlockStore
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models.weights import LoadReport, load_block_weights

from .harness import CONFIGS, make_config, reference_model

NAMES = ["llama", "llama_tied", "qwen2", "gemma2", "mixtral", "gpt2"]


def blocks_of(path: Path, dtype: str = "float32") -> BlockModel:
    return split_model(build_on_meta(read_config(path), compute_dtype=dtype), compute_dtype=dtype)


def fill(model: BlockModel, path: Path) -> tuple[BlockStore, LoadReport]:
    layouts, report = [b.layout for b in model.blocks], LoadReport()
    source = load_block_weights(model, path, report)
    return BlockStore.filled(layouts, source, device=torch.device("cpu")), report


def tensor_names(folder: Path) -> set[str]:
    """As in the published checkpoints of the architecture."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return set(index["weight_map"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_load_and_save_round_trip(name: str, dtype: str, tmp_path: Path) -> None:
    reference = reference_model(make_config(name)).eval()
    reference.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    model = blocks_of(tmp_path / "in", dtype)
    store, report = fill(model, tmp_path / "in")
    assert report.missing == [] and report.unexpected == []
    expected = dict(reference.named_parameters())
    for block in model.blocks:
        for full_name, master in store.masters(block.index).items():
            assert torch.equal(master, expected[full_name]), full_name
    save_model(model, store.masters, tmp_path / "out", dtype="float32", max_shard_bytes=30_000)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, reference(ids).logits)
    assert tensor_names(tmp_path / "out") == tensor_names(tmp_path / "in")
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    assert not (tmp_path / ".out.writing").exists()


def test_saving_over_an_earlier_model_leaves_none_of_its_weights(tmp_path: Path) -> None:
    reference = reference_model(make_config("llama"))
    reference.save_pretrained(tmp_path / "in")
    model = blocks_of(tmp_path / "in")
    store, _ = fill(model, tmp_path / "in")
    out = tmp_path / "out"
    save_model(model, store.masters, out, dtype="float32")
    (out / "log.jsonl").write_text("kept")
    doubled = {n: 2 * t for b in model.blocks for n, t in store.masters(b.index).items()}
    for max_bytes in (30_000, 10**9):  # one file, then shards, then one file again
        save_model(
            model,
            lambda index: {p.name: doubled[p.name] for p in model.blocks[index].layout.params},
            out,
            dtype="float32",
            max_shard_bytes=max_bytes,
        )
        loaded = AutoModelForCausalLM.from_pretrained(out)
        for name, param in loaded.named_parameters():
            assert torch.equal(param, doubled[name]), name
    assert (out / "log.jsonl").read_text() == "kept"
    assert sorted(p.name for p in out.glob("*safetensors*")) == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    reference_model(make_config("llama_tied")).save_pretrained(tmp_path / "in")
    model = blocks_of(tmp_path / "in")
    store, _ = fill(model, tmp_path / "in")
    save_model(model, store.masters, tmp_path / "out", dtype="bfloat16")
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        keys = set(file.keys())
        assert file.get_tensor("model.norm.weight").dtype is torch.bfloat16
    assert "model.embed_tokens.weight" in keys and "lm_head.weight" not in keys


def test_missing_weights_are_initialised_and_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference_model(make_config("llama")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    tensors["surplus"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    store, report = fill(blocks_of(tmp_path), tmp_path)
    assert report.missing == ["model.norm.weight"] and report.unexpected == ["surplus"]
    assert torch.equal(store.masters(4)["model.norm.weight"], torch.ones(32))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    reference_model(make_config("llama")).save_pretrained(tmp_path)
    config = make_config("llama")
    config.intermediate_size = 64
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="shape"):
        fill(blocks_of(tmp_path), tmp_path)


def test_no_weights_is_one_clear_error(tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no file model\.safetensors"):
        fill(blocks_of(tmp_path), tmp_path)


assert set(NAMES) <= CONFIGS.keys()
