"""`attn_implementation: fused_sinks`: plain transformers' eager steps, whole rows and packed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megatrain.data.packing import joined
from megatrain.errors import UserError
from megatrain.models import build_on_meta, read_config
from megatrain.models.flash_sinks import causal_with_sinks
from megatrain.models.packing_proof import prove_packing
from megatrain.models.sinks import (
    FAMILIES,
    FUSED_SINKS,
    attention_with_sinks,
    offer_attention_with_sinks,
)

from .harness import (
    SMALL,
    Reference,
    assert_close,
    assert_steps_equal,
    gradients_of,
    make_engine,
    make_rows,
    reference_model,
)
from .test_parts import MIXTURES, OPTIONS, masters_of

KINDS = {
    "gpt_oss": {**MIXTURES["gpt_oss"], "layer_types": ["full_attention", "sliding_attention"] * 2},
    "granite_swa": {"sliding_window": 4},
}
assert set(KINDS) == set(FAMILIES)


def config_of(kind: str, attention: str | None = None) -> Any:
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind], "num_hidden_layers": 4})
    if attention is not None:
        config._attn_implementation = attention
    return config


def with_sinks(kind: str) -> Any:
    model = reference_model(config_of(kind))
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(param, std=2.0)
    return model


@pytest.mark.parametrize(("kind", "parts"), [*((kind, None) for kind in KINDS), ("gpt_oss", 3)])
def test_two_steps_equal_plain_pytorch(kind: str, parts: int | None) -> None:
    model = with_sinks(kind)
    assert model.config._attn_implementation == "eager"
    options, config = replace(OPTIONS, max_grad_norm=0.05), config_of(kind, FUSED_SINKS)
    engine = make_engine(config, masters_of(model), options=options, expert_parts=parts)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=0.05, rows_per_micro=2)
    steps = [make_rows(5, seed) for seed in range(2)]
    assert_steps_equal(engine, reference, steps, learning_rate=1e-3)


def test_packed_rows_equal_those_of_eager_code() -> None:
    masters, found = masters_of(with_sinks("gpt_oss")), []
    for row in (rows := make_rows(4)):
        row.weights[0] = 0.0
    for attention in ("eager", FUSED_SINKS):
        config = config_of("gpt_oss", attention)
        engine = make_engine(config, masters, options=OPTIONS)
        engine.model.packing = prove_packing(config)
        result = engine.step([joined(rows[:2]), joined(rows[2:])], learning_rate=1e-3)
        found.append((result.loss, gradients_of(engine)))
    assert found[1][0] == pytest.approx(found[0][0], rel=5e-6)
    assert_close(found[1][1], found[0][1], relative=2e-4, what="gradient")


class _Attention(nn.Module):
    num_key_value_groups, is_causal = 2, True

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))


@pytest.mark.parametrize("queries", [1, 3, 7])
def test_fewer_queries_than_keys_see_all_before_them(queries: int) -> None:
    torch.manual_seed(0)
    module, keys, scaling = _Attention().eval(), 7, 8**-0.5
    query = torch.randn(2, 4, queries, 8)
    key, value = torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    mask: Tensor = torch.zeros(queries, keys).masked_fill(~seen, -torch.inf)
    expected, _ = eager_attention_forward(module, query, key, value, mask, scaling)
    for given in (None, seen[None, None]):
        found, _ = attention_with_sinks(
            module, query, key, value, given, scaling, s_aux=module.sinks
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_generated_logits_equal_those_of_eager_code(kind: str, cache: str) -> None:
    """A static cache has room after the tokens that are there, which no query may see."""
    offer_attention_with_sinks()
    model, found = with_sinks(kind).eval(), []
    prompt = torch.arange(14).reshape(2, 7) + 3
    for attention in ("eager", FUSED_SINKS):
        model.set_attn_implementation(attention)
        result = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=6,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            disable_compile=True,
        )
        found.append(torch.stack(result.logits))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("extreme", [0.0, 60.0, -60.0], ids=["usual", "large", "small"])
@pytest.mark.parametrize("window", [0, 1, 3, 64])
def test_gradients_equal_those_of_eager_code(window: int, extreme: float) -> None:
    torch.manual_seed(0)
    module, tokens, scaling = _Attention(), 11, 8**-0.5
    module.sinks.data += extreme * torch.tensor([0.0, 1.0, 0.0, 1.0])
    query = torch.randn(3, 4, tokens, 8, requires_grad=True)
    key, value = (torch.randn(3, 2, tokens, 8, requires_grad=True) for _ in "kv")
    ages = torch.arange(tokens)[:, None] - torch.arange(tokens)
    unseen = (ages < 0) | (ages >= (window or tokens))
    mask: Tensor = torch.zeros(tokens, tokens).masked_fill(unseen, -torch.inf)
    expected, _ = eager_attention_forward(module, query, key, value, mask, scaling)
    found, _ = attention_with_sinks(
        module, query, key, value, None, scaling, s_aux=module.sinks, sliding_window=window or None
    )
    torch.testing.assert_close(found, expected)
    inputs, outgoing = [query, key, value, module.sinks], torch.randn_like(expected)
    pairs = (torch.autograd.grad(each, inputs, outgoing) for each in (found, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_it_is_an_operation_that_pytorch_can_trace() -> None:
    arguments = [torch.randn(2, 5, heads, 8) for heads in (4, 2, 2)]
    given = [each.requires_grad_() for each in (*arguments, torch.randn(4))]
    torch.library.opcheck(causal_with_sinks, (*given, 3, 0.5))


def test_attention_without_sinks_is_refused() -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    config._attn_implementation = FUSED_SINKS
    with pytest.raises(UserError, match=r"fused_sinks of model type 'llama'.*gpt_oss, granite_swa"):
        build_on_meta(config, compute_dtype="float32")
    config = config_of("gpt_oss", FUSED_SINKS)
    config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"attention_dropout: 0\.1, which it does not have"):
        build_on_meta(config, compute_dtype="float32")


@pytest.mark.parametrize(("dropout", "attention"), [(0.0, FUSED_SINKS), (0.1, "eager")])
def test_it_is_the_default_where_nothing_is_dropped(
    dropout: float, attention: str, tmp_path: Path
) -> None:
    config_of("gpt_oss").save_pretrained(tmp_path)
    config = read_config(tmp_path, overrides={"attention_dropout": dropout})
    model = build_on_meta(config, compute_dtype="float32")
    assert model.config._attn_implementation == attention
