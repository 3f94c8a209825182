"""Costs of a micro-batch on a machine that is not here, from what its layers compute.

What of a peak is reached was measured on one H200 (benchmarks/results/bench.jsonl: the shapes of
Qwen2.5-3B and 7B, compiled, micro-batches of 16x1024 tokens) and is taken for every GPU.  Expect
15 % of error there, more for small layers or micro-batches.  For a GPU that was calibrated the
products and attention of the nearest shapes that were measured there take their place.  On the
machine itself `train` and `bench` measure the layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatrain.hardware import Gpu
from megatrain.models.work import LayerWork
from megatrain.schedule import AttentionRate, ComputeRates, Footprint, ProductRate, Rates

REACHED_FLOPS = 0.58
"""Of the dense bf16 peak: 0.54 for the 3B shape, 0.59 for 7B, whole steps, limited by power."""
REACHED_TRIAL = 0.73
"""Of what short trials of products reach: 0.74 for 7B and 0.68 for 3B of the 790 TFLOPS that the
same H200 reached for a moment at 8192x8192x8192, before its power limit."""
REACHED_LINK = 0.80
"""Of PCIe's rate each way: 50.5 GB/s of 63, both ways at once."""
REACHED_MEMORY = 0.90
"""Of the memory's peak: 4.3 TB/s of 4.8."""
EXPERT_ROWS_MOVED = 5.2
"""Times that rows of experts' products are read or written, by all that gathers, weighs and adds
them: 5.5 for Qwen3-30B-A3B and 4.8 for gpt-oss-20b, 16x1024 tokens."""
SCORES_MOVED = (6, 12)
"""Times that scores in memory are read or written, forward and backward: 6 layers of
gpt-oss-20b."""
MORE_PER_PART = 0.3
"""Of a layer's time, for each part of its experts but the first: 8 parts of Qwen3-235B-A22B 0.2, 4
of gpt-oss-20b and 8 of gpt-oss-120b, whose biases are picked by row too, 0.39 and 0.44."""
BESIDE_PARTS = 2
"""Blocks of a layer in parts: what is before and after its experts."""
WORKSPACE_OF_LAYER = 2.6
"""Of what a layer keeps, for its backward with recompute: 2.6 for 3B, 2.5 for 7B."""
WORKSPACE_OF_LOGITS = 2.0
"""Of a chunk's logits, for the loss with its backward."""


def rates_of(gpu: Gpu, *, update_params_per_s: float) -> Rates:
    """Rates to expect of a GPU beside a host that updates so fast."""
    return Rates(
        update_params_per_s=update_params_per_s,
        h2d_bytes_per_s=REACHED_LINK * gpu.link_bytes_per_s,
        d2h_bytes_per_s=REACHED_LINK * gpu.link_bytes_per_s,
        device_bytes_per_s=REACHED_MEMORY * gpu.memory_bytes_per_s,
    )


def compute_of(gpu: Gpu) -> ComputeRates:
    """To expect of a GPU, whatever the shape."""
    reached = REACHED_FLOPS * gpu.bf16_flops_per_s
    attention = AttentionRate(
        length=1, head_dim=1, forward_flops_per_s=reached, backward_flops_per_s=reached
    )
    product = ProductRate(tokens=1, width=1, flops_per_s=reached)
    return ComputeRates(products=(product,), attention=(attention,))


def compute_in_steps(trials: ComputeRates) -> ComputeRates:
    """What whole steps reach where short trials reached this."""
    return ComputeRates(
        products=tuple(
            replace(each, flops_per_s=REACHED_TRIAL * each.flops_per_s) for each in trials.products
        ),
        attention=tuple(
            replace(
                each,
                forward_flops_per_s=REACHED_TRIAL * each.forward_flops_per_s,
                backward_flops_per_s=REACHED_TRIAL * each.backward_flops_per_s,
            )
            for each in trials.attention
        ),
    )


def estimate_footprint(
    works: Sequence[LayerWork],
    *,
    compute: ComputeRates,
    rates: Rates,
    shape: tuple[int, int],
    hidden_size: int,
    vocab_size: int,
    chunk_tokens: int,
    item_bytes: int = 2,
) -> Footprint:
    """Costs of one micro-batch.

    Args:
        works: of each layer, for one row.
        compute: of the GPU, in whole steps.
        rates: of the machine.
        shape: (B, T).
        hidden_size: D.
        vocab_size: rows of the head.
        chunk_tokens: whose logits exist at one time.
        item_bytes: of the compute dtype.
    """
    rows, length = shape
    tokens = rows * length
    flops_per_s = compute.product_flops_per_s(tokens=tokens, width=hidden_size)
    input_bytes = tokens * hidden_size * item_bytes
    logits = min(chunk_tokens, tokens) * vocab_size * item_bytes
    largest = max(work.kept_bytes for work in works) * rows
    attention = [compute.attention_of(length=length, head_dim=each.head_dim) for each in works]
    both = list(zip(works, attention, strict=True))
    product_s = rows * _mean([each.product_flops for each in works]) / flops_per_s
    expert_bytes = rows * _mean([each.expert_row_bytes for each in works])
    product_s += EXPERT_ROWS_MOVED * expert_bytes / rates.device_bytes_per_s
    scores_s = rows * _mean([each.score_bytes for each in works]) / rates.device_bytes_per_s
    attention_s = rows * _mean([w.attention_flops / a.forward_flops_per_s for w, a in both])
    attention_backward_s = rows * _mean(
        [2 * w.attention_flops / a.backward_flops_per_s for w, a in both]
    )
    forward_s = product_s + attention_s + SCORES_MOVED[0] * scores_s
    saved_backward_s = 2 * product_s + attention_backward_s + SCORES_MOVED[1] * scores_s
    not_recomputed_s = rows * _mean([each.last_product_flops for each in works]) / flops_per_s
    return Footprint(
        input_bytes=input_bytes,
        saved_bytes=tuple(work.kept_bytes * rows for work in works),
        calls_bytes=0,
        workspace_bytes=int(max(WORKSPACE_OF_LAYER * largest, WORKSPACE_OF_LOGITS * logits)),
        embed_s=2 * input_bytes / rates.device_bytes_per_s,
        forward_s=forward_s,
        backward_s=saved_backward_s + forward_s - not_recomputed_s,
        saved_backward_s=saved_backward_s,
        embed_backward_s=6 * input_bytes / rates.device_bytes_per_s,
        loss_s=6 * tokens * hidden_size * vocab_size / flops_per_s,
        rates=rates,
    )


def in_stages(footprint: Footprint, layers: Sequence[int], carried_inputs: int) -> Footprint:
    """The same where layers are cut: seconds and what is kept, spread evenly over their blocks.

    Every part gathers and adds all rows, those of other parts' experts too.

    Args:
        footprint: with one block a layer.
        layers: which layer each block belongs to.
        carried_inputs: what all layers hand on between their blocks, in inputs of a layer.
    """
    counts = Counter(layers)
    slower = [1 + MORE_PER_PART * max(0, blocks - BESIDE_PARTS - 1) for blocks in counts.values()]
    share = sum(slower) / len(layers)
    return replace(
        footprint,
        saved_bytes=tuple(footprint.saved_bytes[each] // counts[each] for each in layers),
        carried_bytes=carried_inputs * footprint.input_bytes,
        forward_s=share * footprint.forward_s,
        backward_s=share * footprint.backward_s,
        saved_backward_s=share * footprint.saved_backward_s,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
