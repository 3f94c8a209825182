"""Quantised checkpoints: every master is what the stored bytes mean, and the rest is plain."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from megatrain.checkpoint import save_model
from megatrain.errors import UserError
from megatrain.memory import BlockStore
from megatrain.models import BlockModel, read_config
from megatrain.models.source import SafetensorsSource
from megatrain.models.weights import LoadReport, load_block_weights

from .checkpoints import rewrite, save_reference, to_fp8, to_mxfp4
from .harness import SMALL, make_config
from .test_weights import blocks_of, fill

GPT_OSS: dict[str, Any] = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, Any] = {
    **SMALL,
    "hidden_size": 160,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 132,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 20,
    "v_head_dim": 32,
}
QWEN3: dict[str, Any] = {**SMALL, "hidden_size": 192, "intermediate_size": 200, "head_dim": 64}
QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 144,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.")


def masters_of(model: BlockModel, store: BlockStore) -> dict[str, Tensor]:
    return {n: t for block in model.blocks for n, t in store.masters(block.index).items()}


def expected_masters(folder: Path, meaning: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain model in fp32, as transformers builds it from the plain tensors."""
    plain = folder.with_name("plain")
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    wide = {n: t.float().contiguous() for n, t in meaning.items()}
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return dict(model.named_parameters())


def make_fp8(
    model_type: str, options: dict[str, Any], folder: Path, block: tuple[int, int] | None
) -> dict[str, Tensor]:
    _, tensors = save_reference(AutoConfig.for_model(model_type, **options), folder)
    stored, meaning = to_fp8(tensors, block, KEPT)
    rewrite(folder, stored, FP8 | {"weight_block_size": block and list(block)})
    assert sum(t.dtype is torch.float8_e4m3fn for t in stored.values()) > 10
    return meaning


def make_mxfp4(folder: Path) -> dict[str, Tensor]:
    _, tensors = save_reference(AutoConfig.for_model("gpt_oss", **GPT_OSS), folder)
    stored, meaning = to_mxfp4(tensors)
    assert sum(name.endswith("_blocks") for name in stored) == 6
    rewrite(folder, stored, MXFP4)
    return meaning


def check_masters(folder: Path, meaning: dict[str, Tensor], dtype: str) -> BlockModel:
    model = blocks_of(folder, dtype)
    store, report = fill(model, folder)
    assert report.missing == [] and report.unexpected == []
    mine, expected = masters_of(model, store), expected_masters(folder, meaning)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name
    check_saved(model, store, folder.with_name("out"), expected)
    return model


def check_saved(
    model: BlockModel, store: BlockStore, out: Path, expected: dict[str, Tensor]
) -> None:
    """The saved model is a plain one, in the published layout, for plain transformers."""
    save_model(model, store.masters, out, dtype="float32")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    for name, param in loaded.named_parameters():
        assert torch.equal(param, expected[name]), name
    plain = out.with_name("plain")
    if plain.exists():
        assert load_file(out / "model.safetensors").keys() == keys_of(plain)


def keys_of(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_of_gpt_oss(dtype: str, tmp_path: Path) -> None:
    meaning = make_mxfp4(tmp_path / "in")
    check_masters(tmp_path / "in", meaning, dtype)


def test_mxfp4_agrees_with_transformers(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    model = blocks_of(tmp_path)
    store, _ = fill(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    for name, tensor in masters_of(model, store).items():
        assert torch.equal(tensor, theirs.get_parameter(name)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "options", "block"),
    [
        ("deepseek_v3", DEEPSEEK, (128, 128)),
        ("qwen3", QWEN3, (128, 128)),
        ("qwen3", QWEN3, None),
        ("qwen3_moe", QWEN3_MOE, (128, 64)),
    ],
)
def test_fp8(
    model_type: str,
    options: dict[str, Any],
    block: tuple[int, int] | None,
    dtype: str,
    tmp_path: Path,
) -> None:
    meaning = make_fp8(model_type, options, tmp_path / "in", block)
    check_masters(tmp_path / "in", meaning, dtype)


def test_fp8_agrees_with_transformers_where_blocks_are_whole(tmp_path: Path) -> None:
    options = {**QWEN3, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    make_fp8("qwen3", options, tmp_path, (64, 64))
    model = blocks_of(tmp_path)
    store, _ = fill(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    for name, tensor in masters_of(model, store).items():
        assert torch.equal(tensor, theirs.get_parameter(name)), name


def test_a_wide_tensor_keeps_its_digits_beside_narrow_ones(tmp_path: Path) -> None:
    _, tensors = save_reference(make_config("llama"), tmp_path)
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = blocks_of(tmp_path)
    store, _ = fill(model, tmp_path)
    for name, master in masters_of(model, store).items():
        assert torch.equal(master, tensors[name].float()), name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ({"quant_method": "mxfp4"}, "mxfp4 in a 'llama'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 in a 'llama'"),
    ({"quant_method": "new-thing"}, "new-thing"),
]


@pytest.mark.parametrize(("quantisation", "name"), REFUSED)
def test_other_quantisations_are_refused_by_name(
    quantisation: dict[str, Any], name: str, tmp_path: Path
) -> None:
    config = make_config("llama")
    config.quantization_config = quantisation
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"quantised with {name}") as caught:
        read_config(tmp_path)
    assert "unquantised" in caught.value.change


def test_bytes_that_nothing_names_are_refused(tmp_path: Path) -> None:
    make_fp8("qwen3", QWEN3, tmp_path, (128, 128))
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"the weight model\.layers\.0.* without the scales"):
        fill(blocks_of(tmp_path), tmp_path)


def test_scales_of_another_block_size_are_refused(tmp_path: Path) -> None:
    make_fp8("qwen3", QWEN3, tmp_path, (128, 128))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [96, 96]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"with scales \(2, 2\), not \(2, 3\)"):
        fill(blocks_of(tmp_path), tmp_path)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_one_block_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was dequantised or handed out and is still in memory is never more than a block."""
    if kind == "mxfp4":
        make_mxfp4(tmp_path)
    else:
        make_fp8("deepseek_v3", DEEPSEEK, tmp_path, (128, 128))
    alive: dict[StorageWeakRef, int] = {}
    peak = 0

    def watch(tensor: Tensor) -> None:
        nonlocal peak
        storage = tensor.untyped_storage()
        alive[StorageWeakRef(storage)] = storage.nbytes()
        peak = max(peak, sum(n for reference, n in alive.items() if not reference.expired()))

    read = SafetensorsSource.read

    def watched_read(self: SafetensorsSource, key: str) -> Tensor:
        tensor = read(self, key)
        if len(self._stored[key]) > 1:
            watch(tensor)
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", watched_read)
    model = blocks_of(tmp_path)
    held = []
    for _, tensors in load_block_weights(model, tmp_path, LoadReport()):
        for tensor in tensors.values():
            watch(tensor)
        held.append(tensors)
    del tensors
    assert held == [{}] * len(model.blocks)
    total = 4 * model.num_params
    largest = max(4 * block.layout.num_params for block in model.blocks)
    assert largest < total / 2
    assert largest / 4 < peak <= 1.05 * largest, (peak, largest, total)
