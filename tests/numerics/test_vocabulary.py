"""Added rows are transformers' own, old rows keep their bits, training goes on exactly."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.checkpoint import save_model
from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.memory import BlockStore
from megatrain.models import build_on_meta
from megatrain.models.hub import find_model
from megatrain.models.load import LoadedBlocks, load_blocks
from megatrain.models.vocabulary import check_growth, rows_needed, with_rows
from megatrain.models.weights import LoadReport

from .harness import ADAMW, SMALL, VOCAB, Reference, engine_state, make_config, reference_model

NEW = VOCAB + 5
PHI = AutoConfig.for_model("phi", **{**SMALL, "num_key_value_heads": 4})
GPTJ = AutoConfig.for_model("gptj", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
MODELS = {
    "llama": make_config("llama"),
    "llama_tied": make_config("llama_tied"),
    "gpt2": make_config("gpt2"),
    "gemma2": make_config("gemma2"),
    "phi": PHI,  # a bias in the head
    "gptj": GPTJ,
}
BIASED = {"phi", "gptj"}


def saved(name: str, folder: Path) -> Any:
    """A reference model with a head bias that is not zero, saved."""
    model = reference_model(copy.deepcopy(MODELS[name]))
    bias = model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias, mean=0.5)
    model.save_pretrained(folder)
    return model


def fill(blocks: LoadedBlocks, seed: int = 0) -> BlockStore:
    layouts = [block.layout for block in blocks.model.blocks]
    report = LoadReport()
    store = BlockStore.filled(
        layouts, blocks.weights(report, seed=seed), device=torch.device("cpu")
    )
    assert report.missing == [] and report.unexpected == []
    return store


def masters(blocks: LoadedBlocks, store: BlockStore) -> dict[str, Tensor]:
    return {n: t for b in blocks.model.blocks for n, t in store.masters(b.index).items()}


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_that_transformers_adds(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path)
    blocks = load_blocks(find_model(str(tmp_path)), compute_dtype="float32", num_tokens=NEW)
    assert blocks.grown == f"the vocabulary grew from {VOCAB} to {NEW} rows"
    mine = masters(blocks, fill(blocks))
    old = {n: p.detach().clone() for n, p in reference.named_parameters()}
    reference.resize_token_embeddings(NEW, mean_resizing=True)
    theirs = {n: p.detach() for n, p in reference.named_parameters()}
    assert mine.keys() == theirs.keys()
    changed = [n for n in old if old[n].shape != theirs[n].shape]
    tied = reference.config.tie_word_embeddings
    assert len(changed) == (1 if tied else 2) + (name in BIASED)
    for parameter, tensor in mine.items():
        assert tensor.shape == theirs[parameter].shape
        assert torch.equal(tensor[:VOCAB], old[parameter][:VOCAB]), parameter
        if parameter in changed:
            spread = float(old[parameter].std())
            assert float((tensor[VOCAB:] - theirs[parameter][VOCAB:]).abs().max()) < 1e-3 * spread
            mean = old[parameter].mean(0)
            assert float((tensor[VOCAB:] - mean).abs().max()) < 1e-3 * spread


def test_new_rows_follow_from_the_seed_and_have_the_spread_of_the_old(tmp_path: Path) -> None:
    config = make_config("llama")
    config.vocab_size = 400  # enough rows for a covariance that is positive definite
    reference = reference_model(config)
    reference.save_pretrained(tmp_path)
    blocks = load_blocks(find_model(str(tmp_path)), compute_dtype="float32", num_tokens=2400)
    first, again, other = (masters(blocks, fill(blocks, seed)) for seed in (0, 0, 1))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        old, new = first[name][:400], first[name][400:]
        ratio = (new - old.mean(0)).std() / (old.std() * 1e-9**0.5)
        assert 0.8 < float(ratio) < 1.3


def test_a_bf16_checkpoint_grows_in_fp32(tmp_path: Path) -> None:
    reference_model(make_config("llama"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    blocks = load_blocks(find_model(str(tmp_path)), compute_dtype="bfloat16", num_tokens=NEW)
    tensor = masters(blocks, fill(blocks))["lm_head.weight"]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(tensor[:VOCAB], reference.lm_head.weight)
    assert torch.allclose(tensor[VOCAB:], reference.lm_head.weight.mean(0), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "phi", "gptj"])
def test_a_step_with_the_new_tokens_equals_plain_pytorch(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "in")
    blocks = load_blocks(find_model(str(tmp_path / "in")), compute_dtype="float32", num_tokens=NEW)
    store = fill(blocks)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(blocks.model.config))
    model.load_state_dict(masters(blocks, store), strict=False)
    model.train()
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=2)
    options = EngineOptions(adamw=ADAMW, micro_batch_rows=2, host_threads=1)
    engine = Engine(blocks.model, store, options, device=torch.device("cpu"))
    rows = [
        Row(input_ids=np.arange(NEW - 9 + i, NEW - i), weights=np.ones(9 - 2 * i, dtype=np.float32))
        for i in range(3)
    ]
    for _ in range(2):
        assert engine.step(rows, learning_rate=1e-3).loss == pytest.approx(
            reference.step(rows).loss, rel=1e-6
        )
    mine = engine_state(engine, Purpose.WEIGHT)
    for parameter, param in model.named_parameters():
        assert torch.allclose(mine[parameter], param, rtol=1e-5, atol=2e-6), parameter
    save_model(blocks.model, store.masters, tmp_path / "out", dtype="float32")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.config.vocab_size == NEW == len(loaded.get_input_embeddings().weight)
    ids = torch.from_numpy(rows[0].input_ids)[None]
    with torch.no_grad():
        found = loaded.eval()(ids).logits
        assert torch.allclose(found, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) == (name != "llama_tied")  # noqa: SIM118


def test_nothing_grows_where_there_is_room_and_nothing_shrinks(tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    for num_tokens in (0, 7, VOCAB):
        blocks = load_blocks(
            find_model(str(tmp_path)), compute_dtype="float32", num_tokens=num_tokens
        )
        assert blocks.model is blocks.stored and blocks.grown == ""
        assert blocks.model.config.vocab_size == VOCAB
    blocks = load_blocks(find_model(str(tmp_path)), compute_dtype="float32", multiple_of=64)
    assert blocks.model.config.vocab_size == 128


@pytest.mark.parametrize(
    ("rows", "tokens", "multiple", "expected"),
    [
        (99, 50, None, 99),
        (99, 100, None, 100),
        (99, 100, 64, 128),
        (99, 5, 64, 128),
        (64, 5, 64, 64),
    ],
)
def test_rows_needed(rows: int, tokens: int, multiple: int | None, expected: int) -> None:
    assert rows_needed(rows, tokens, multiple) == expected


def test_persistent_buffers_come_along(tmp_path: Path) -> None:
    """A router's correction bias is a buffer, and stored."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8}
    more = {"q_lora_rank": 8, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    options = {**SMALL, **sizes, **heads, **more, "first_k_dense_replace": 1}
    reference = reference_model(AutoConfig.for_model("deepseek_v3", **options))
    names = [n for n, _ in reference.named_buffers() if "correction_bias" in n]
    assert names
    for name in names:
        torch.nn.init.normal_(reference.get_buffer(name))
    reference.save_pretrained(tmp_path)
    blocks = load_blocks(find_model(str(tmp_path)), compute_dtype="float32", num_tokens=NEW)
    fill(blocks)
    for name in names:
        assert torch.equal(blocks.model.hf_model.get_buffer(name), reference.get_buffer(name))


def test_another_vocabulary_in_the_model_is_refused_by_name() -> None:
    config = make_config("llama")
    small = build_on_meta(config, compute_dtype="float32")
    large = build_on_meta(with_rows(config, NEW), compute_dtype="float32")
    check_growth(small, large)
    for model, rows in ((small, VOCAB), (large, NEW)):
        model.model.layers[0].register_buffer("table", torch.zeros(rows))
    with pytest.raises(UserError, match=r"llama.*size of model\.layers\.0\.table"):
        check_growth(small, large)
    config.vocab_size_per_layer_input = VOCAB
    with pytest.raises(UserError, match=f"llama.*vocab_size_per_layer_input={VOCAB}"):
        check_growth(build_on_meta(config, compute_dtype="float32"), large)
