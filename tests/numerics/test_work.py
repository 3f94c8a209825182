"""What is counted on meta, against what real layers compute and what compiled ones keep."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatrain.engine.compiled import Compiler, Run
from megatrain.models import build_on_meta, split_model
from megatrain.models.active import share_of_experts
from megatrain.models.passes import as_leaves, forward_with_graph
from megatrain.models.sinks import FUSED_SINKS
from megatrain.models.work import count_layers

from .harness import make_config, reference_model
from .test_parts import config_of

LENGTH = 16


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "gemma2", "gpt2"])
def test_products_are_those_of_a_real_layer(name: str) -> None:
    config = make_config(name)
    config._attn_implementation = "eager"  # whose products both count, all pairs of tokens
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    counted = sum(work.product_flops for work in count_layers(model, LENGTH))
    real = reference_model(config)
    with FlopCounterMode(display=False) as counter:
        real(input_ids=torch.zeros((1, LENGTH), dtype=torch.long))
    # Rotary angles are a product too, a tiny one outside the layers.
    head = 2 * LENGTH * config.hidden_size * config.vocab_size
    assert counted == pytest.approx(counter.get_total_flops() - head, rel=0.01)


def test_experts_count_as_often_as_tokens_use_them() -> None:
    config = make_config("mixtral")
    model = split_model(build_on_meta(config, compute_dtype="bfloat16"), compute_dtype="bfloat16")
    (work, *_) = count_layers(model, LENGTH)
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = hidden * head_dim * (heads + config.num_attention_heads)
    experts = config.num_experts_per_tok * 3 * hidden * inner
    router = hidden * config.num_local_experts
    assert work.traced
    assert work.product_flops == 2 * LENGTH * (attention + experts + router)
    in_and_out = (hidden + 2 * inner) + (inner + hidden)  # numbers of two bytes
    assert work.expert_row_bytes == 2 * LENGTH * config.num_experts_per_tok * in_and_out
    assert work.last_product_flops == 0  # weighed by the router, so backward needs it
    assert work.score_bytes == 0  # SDPA's
    assert share_of_experts(model) == config.num_experts_per_tok / config.num_local_experts


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_compiled_layer_keeps_what_was_counted(name: str) -> None:
    model = split_model(
        build_on_meta(make_config(name), compute_dtype="float32"), compute_dtype="float32"
    )
    counted = count_layers(model, LENGTH)[0].kept_bytes
    embed = {p.name: torch.zeros(p.shape) for p in model.embed.layout.params}
    x_BTD, calls, _ = model.prologue(embed, torch.zeros((1, LENGTH), dtype=torch.long))
    layer = model.container[0]
    params = {n: torch.randn(p.shape) * 0.02 for n, p in layer.named_parameters()}
    leaves = as_leaves(params, x_BTD, {}, trained=params.keys(), differentiable=(), passes_on=True)
    run = partial(model.layer, 0)
    stored: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in params.values()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unchanged(tensor: Any) -> Any:
        return tensor

    compiler = Compiler("aot_eager_decomp_partition")
    args = (forward_with_graph, Run(plain=run, shared=run), *leaves[:2], calls[0], leaves.carried)
    compiler(*args)  # compiles
    with torch.autograd.graph.saved_tensors_hooks(note, unchanged):
        compiler(*args)
    assert not compiler.notices and compiler.num_programs == 1
    # Norms' factors and rotary angles come on top.
    assert counted <= sum(stored.values()) <= 1.3 * counted


def test_windows_of_attention_with_sinks_are_counted() -> None:
    config = config_of(
        "gpt_oss", layer_types=["full_attention", "sliding_attention", "full_attention"]
    )
    config._attn_implementation = FUSED_SINKS
    model = split_model(build_on_meta(config, compute_dtype="bfloat16"), compute_dtype="bfloat16")
    full, sliding, _ = count_layers(model, LENGTH)
    per_key = 4 * LENGTH * config.num_attention_heads * config.head_dim
    assert full.attention_flops == per_key * LENGTH / 2
    assert sliding.attention_flops == per_key * config.sliding_window
    assert full.score_bytes == sliding.score_bytes == 0
    assert full.kept_bytes == sliding.kept_bytes


def test_scores_that_go_through_memory_are_counted() -> None:
    config = make_config("llama")
    config._attn_implementation = "eager"
    model = split_model(build_on_meta(config, compute_dtype="bfloat16"), compute_dtype="bfloat16")
    (work, *_) = count_layers(model, LENGTH)
    assert work.score_bytes == 4 * config.num_attention_heads * LENGTH**2  # softmax is in fp32
