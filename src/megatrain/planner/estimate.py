"""Costs of a micro-batch on a machine that is not here, from what its layers compute.

What of a peak is reached was measured on one H200 (benchmarks/results/bench.jsonl: the shapes of
Qwen2.5-3B and 7B, compiled, micro-batches of 16x1024 tokens) and is taken for every GPU.  Expect
15 % of error there, more for small layers or micro-batches.  On the machine itself `train` and
`bench` measure instead.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatrain.hardware import Gpu
from megatrain.models.work import LayerWork
from megatrain.schedule import Footprint, Rates

REACHED_FLOPS = 0.58
"""Of the dense bf16 peak: 0.54 for the 3B shape, 0.59 for 7B, whole steps, limited by power."""
REACHED_LINK = 0.80
"""Of PCIe's rate each way: 50.5 GB/s of 63, both ways at once."""
REACHED_MEMORY = 0.90
"""Of the memory's peak: 4.3 TB/s of 4.8."""
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


def estimate_footprint(
    works: Sequence[LayerWork],
    *,
    gpu: Gpu,
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
        gpu: where it is computed.
        rates: of the machine.
        shape: (B, T).
        hidden_size: D.
        vocab_size: rows of the head.
        chunk_tokens: whose logits exist at one time.
        item_bytes: of the compute dtype.
    """
    rows, length = shape
    tokens, flops_per_s = rows * length, REACHED_FLOPS * gpu.bf16_flops_per_s
    input_bytes = tokens * hidden_size * item_bytes
    logits = min(chunk_tokens, tokens) * vocab_size * item_bytes
    largest = max(work.kept_bytes for work in works) * rows
    whole = [work.product_flops + work.attention_flops for work in works]
    forward_s = rows * _mean(whole) / flops_per_s
    recomputed = [each - work.last_product_flops for each, work in zip(whole, works, strict=True)]
    return Footprint(
        input_bytes=input_bytes,
        saved_bytes=tuple(work.kept_bytes * rows for work in works),
        calls_bytes=0,
        workspace_bytes=int(max(WORKSPACE_OF_LAYER * largest, WORKSPACE_OF_LOGITS * logits)),
        embed_s=2 * input_bytes / rates.device_bytes_per_s,
        forward_s=forward_s,
        backward_s=2 * forward_s + rows * _mean(recomputed) / flops_per_s,
        saved_backward_s=2 * forward_s,
        embed_backward_s=6 * input_bytes / rates.device_bytes_per_s,
        loss_s=6 * tokens * hidden_size * vocab_size / flops_per_s,
        rates=rates,
    )


def in_stages(footprint: Footprint, layers: Sequence[int], carried_inputs: int) -> Footprint:
    """The same where layers are cut: seconds and what is kept, spread evenly over their blocks.

    Args:
        footprint: with one block a layer.
        layers: which layer each block belongs to.
        carried_inputs: what all layers hand on between their blocks, in inputs of a layer.
    """
    counts = Counter(layers)
    share = len(footprint.saved_bytes) / len(layers)
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
