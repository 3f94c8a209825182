"""Costs of a micro-batch from published or measured rates of computation."""

from dataclasses import replace

import pytest

from megatrain.hardware import GPUS
from megatrain.models.work import LayerWork
from megatrain.planner.estimate import (
    EXPERT_ROWS_MOVED,
    MORE_PER_PART,
    REACHED_FLOPS,
    REACHED_TRIAL,
    SCORES_MOVED,
    compute_in_steps,
    compute_of,
    estimate_footprint,
    in_stages,
    rates_of,
)
from megatrain.schedule import AttentionRate, ComputeRates, Footprint, ProductRate

WORK = LayerWork(
    product_flops=8e9,
    last_product_flops=2e9,
    attention_flops=1e9,
    head_dim=64,
    kept_bytes=10**6,
    traced=True,
)
UNTRACED = replace(WORK, attention_flops=0.0, head_dim=0, last_product_flops=0.0)
MEASURED = ComputeRates(
    products=tuple(
        ProductRate(tokens=tokens, width=width, flops_per_s=1e9 * tokens * width)
        for tokens in (2048, 16384)
        for width in (1024, 4096)
    ),
    attention=tuple(
        AttentionRate(
            length=length,
            head_dim=head_dim,
            forward_flops_per_s=1e9 * length * head_dim,
            backward_flops_per_s=5e8 * length * head_dim,
        )
        for length in (1024, 4096)
        for head_dim in (64, 128)
    ),
)
ROWS, LENGTH, HIDDEN, VOCAB = 2, 1024, 1024, 5000


def footprint(compute: ComputeRates, *works: LayerWork) -> Footprint:
    return estimate_footprint(
        works,
        compute=compute,
        rates=rates_of(GPUS["L4"], update_params_per_s=1e9),
        shape=(ROWS, LENGTH),
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        chunk_tokens=2048,
    )


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ((2048, 1024), (2048, 1024)),
        ((1, 1), (2048, 1024)),
        ((10**9, 10**9), (16384, 4096)),
        ((5792, 2048), (2048, 1024)),  # below the geometric means, and on one: the first
        ((5793, 2049), (16384, 4096)),
    ],
)
def test_the_nearest_product(asked: tuple[int, int], nearest: tuple[int, int]) -> None:
    rate = MEASURED.product_flops_per_s(tokens=asked[0], width=asked[1])
    assert rate == 1e9 * nearest[0] * nearest[1]


def test_the_nearest_attention() -> None:
    found = MEASURED.attention_of(length=2500, head_dim=96)
    assert (found.length, found.head_dim) == (4096, 128)
    assert MEASURED.attention_of(length=1, head_dim=0) == MEASURED.attention[0]


def test_as_published_all_flops_are_alike() -> None:
    flops_per_s = REACHED_FLOPS * GPUS["L4"].bf16_flops_per_s
    found = footprint(compute_of(GPUS["L4"]), WORK, UNTRACED)
    forward = ROWS * (9e9 + 8e9) / 2
    assert found.forward_s == pytest.approx(forward / flops_per_s)
    assert found.saved_backward_s == pytest.approx(2 * forward / flops_per_s)
    assert found.backward_s == pytest.approx((3 * forward - ROWS * 2e9 / 2) / flops_per_s)
    assert found.loss_s == pytest.approx(6 * ROWS * LENGTH * HIDDEN * VOCAB / flops_per_s)


def test_as_measured_products_and_attention_have_their_own_rates() -> None:
    found = footprint(compute_in_steps(MEASURED), WORK)
    product_rate, attention_rate = 1e9 * 2048 * 1024, 1e9 * 1024 * 64
    product_s = ROWS * 8e9 / product_rate / REACHED_TRIAL
    attention_s = ROWS * 1e9 / attention_rate / REACHED_TRIAL
    last_s = ROWS * 2e9 / product_rate / REACHED_TRIAL
    assert found.forward_s == pytest.approx(product_s + attention_s)
    assert found.saved_backward_s == pytest.approx(2 * product_s + 4 * attention_s)
    assert found.backward_s == pytest.approx(3 * product_s + 5 * attention_s - last_s)


def test_experts_and_scores_in_memory_take_longer() -> None:
    compute, rates = compute_of(GPUS["L4"]), rates_of(GPUS["L4"], update_params_per_s=1e9)
    plain = footprint(compute, WORK)
    experts = footprint(compute, replace(WORK, expert_row_bytes=4e6))
    more_s = EXPERT_ROWS_MOVED * ROWS * 4e6 / rates.device_bytes_per_s
    assert experts.forward_s == pytest.approx(plain.forward_s + more_s)
    assert experts.saved_backward_s == pytest.approx(plain.saved_backward_s + 2 * more_s)
    scores = footprint(compute, replace(WORK, score_bytes=10**6))
    moved_s = ROWS * 10**6 / rates.device_bytes_per_s
    assert scores.forward_s == pytest.approx(plain.forward_s + SCORES_MOVED[0] * moved_s)
    assert scores.backward_s == pytest.approx(plain.backward_s + sum(SCORES_MOVED) * moved_s)


def test_each_further_part_of_a_layer_s_experts_takes_longer() -> None:
    whole = footprint(compute_of(GPUS["L4"]), WORK, WORK)
    parts = 3
    layers = [0] + [1] * (parts + 2)  # the first is not cut
    cut = in_stages(whole, layers, carried_inputs=1)
    expected = 2 + MORE_PER_PART * (parts - 1)
    assert len(layers) * cut.forward_s == pytest.approx(expected * whole.forward_s)
    assert len(layers) * cut.backward_s == pytest.approx(expected * whole.backward_s)
