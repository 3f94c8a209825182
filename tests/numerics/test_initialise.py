"""Random weights are drawn as transformers draws them.

What two whole-model initialisations with different seeds agree on (norm weights, biases, A_log) is
deterministic and must be equal.  The rest must have the same distribution: mean and deviation
within five standard errors, and a Kolmogorov-Smirnov distance that two samples of one distribution
exceed once in 100,000 times.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from megatrain.errors import UserError
from megatrain.models import build_on_meta, split_model
from megatrain.models.initialise import init_block_weights

from .harness import CONFIGS, GPT2, SMALL, make_config, reference_model

STANDARD_ERRORS = 5.0
KOLMOGOROV = 2.5
"""The two-sample distance times sqrt(n / 2); exceeded with probability 2 exp(-2 * 2.5^2)."""

SEEDS = range(8)

WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
STATE_SPACE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 16}
MORE: dict[str, dict[str, Any]] = {
    "gemma3_text": WIDE | {"sliding_window": 4},
    "qwen3_moe": WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": SMALL
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "mamba": STATE_SPACE,
    "mamba2": STATE_SPACE | {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    "opt": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "ctrl": GPT2 | {"dff": 48, "n_head": 4},  # a bias beside a weight that is tied
    "gpt2_deep": GPT2 | {"n_layer": 6, "n_embd": 64},
}
NAMES = ["llama", "llama_tied", "qwen2", "gemma2", "mixtral", "gpt2", *MORE]


def config_of(name: str) -> Any:
    if name in CONFIGS:
        return make_config(name)
    return AutoConfig.for_model(name.removesuffix("_deep"), **MORE[name])


def kolmogorov_smirnov(first: Tensor, second: Tensor) -> float:
    """Largest distance between the empirical distributions of two samples."""
    points = torch.cat([first, second]).sort().values
    ranks = [
        torch.searchsorted(sample.sort().values, points, right=True) / len(sample)
        for sample in (first, second)
    ]
    return float((ranks[0] - ranks[1]).abs().max())


def assert_same_distribution(mine: Tensor, theirs: Tensor, name: str) -> None:
    """Two flat samples of equal size, several seeds in each."""
    count, spread = theirs.numel(), float(theirs.std())
    error = spread * math.sqrt(2 / count)
    assert abs(float(mine.mean() - theirs.mean())) <= STANDARD_ERRORS * error, name
    fourth_moment = float(((theirs - theirs.mean()) / spread).pow(4).mean())
    error *= math.sqrt(fourth_moment - 1) / 2
    assert abs(float(mine.std()) - spread) <= STANDARD_ERRORS * error, name
    distance = kolmogorov_smirnov(mine, theirs) * math.sqrt(count / 2)
    assert distance <= KOLMOGOROV, f"{name}: {distance:.2f}"


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_drawn_as_transformers_draws_them(name: str) -> None:
    config = config_of(name)
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    before = {n: b.clone() for n, b in model.hf_model.named_buffers()}
    mine = [
        {n: t for _, ts in init_block_weights(model, seed=seed) for n, t in ts.items()}
        for seed in SEEDS
    ]
    theirs = [
        {n: p.detach() for n, p in reference_model(config, seed=seed).named_parameters()}
        for seed in SEEDS
    ]
    assert mine[0].keys() == theirs[0].keys()
    for full_name, first in theirs[0].items():
        samples, expected = [m[full_name] for m in mine], [t[full_name] for t in theirs]
        assert samples[0].shape == first.shape and samples[0].dtype is torch.float32, full_name
        if all(torch.equal(first, other) for other in expected):
            assert all(torch.equal(first, sample) for sample in samples), full_name
        else:
            pooled, pooled_expected = torch.stack(samples), torch.stack(expected)
            assert_same_distribution(pooled.flatten(), pooled_expected.flatten(), full_name)
    after = dict(model.hf_model.named_buffers())
    assert all(torch.equal(after[n], buffer) for n, buffer in before.items())
    assert all(param.is_meta for param in model.hf_model.parameters())


@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba2"])
def test_the_seed_decides_and_no_two_layers_are_alike(name: str) -> None:
    config = config_of(name)
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    state = torch.get_rng_state()
    mine, again, other = (
        {n: t for _, ts in init_block_weights(model, seed=seed) for n, t in ts.items()}
        for seed in (3, 3, 4)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(mine[n], again[n]) for n in mine)
    drawn = [n for n in mine if not torch.equal(mine[n], other[n])]
    layer_0 = [n for n in drawn if ".layers.0." in n]
    assert layer_0
    assert not any(torch.equal(mine[n], mine[n.replace(".0.", ".1.", 1)]) for n in layer_0)


def test_what_only_a_constructor_sets_is_refused_by_name() -> None:
    config = AutoConfig.for_model("openai-gpt", **GPT2)
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    with pytest.raises(UserError, match=r"c_attn\.weight: no rule .*model_init: pretrained"):
        list(init_block_weights(model, seed=0))
