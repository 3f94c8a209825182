"""Matrix products and attention on this machine's GPU, by shape, each timed for a moment."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.engine.attention import attention_choice
from megatrain.engine.device import release_cached_memory
from megatrain.schedule import AttentionRate, ProductRate

TOKENS = (2048, 16384)
WIDTHS = (1024, 2048, 4096, 8192)
EXPANSION = 4
"""Columns of a product's result for each of its input's, as in an MLP."""
LENGTHS = (1024, 4096, 16384)
HEAD_DIMS = (64, 128)
NUM_PRODUCTS, NUM_ATTENTION = len(TOKENS) * len(WIDTHS), len(LENGTHS) * len(HEAD_DIMS)
ATTENTION_TOKENS = 16384
ATTENTION_WIDTH = 2048
"""Of all heads together."""
TRIAL_SECONDS = 0.2
"""Of one shape, beside its first call."""
MOST_CALLS = 30

Rate = TypeVar("Rate")


def product_rates(
    device: torch.device, dtype: torch.dtype, deadline: float
) -> Iterator[ProductRate]:
    """Of each shape that the GPU has room for, until the deadline.

    Args:
        device: a GPU.
        dtype: of the matrices.
        deadline: of `time.monotonic`, for the beginning of a trial.
    """
    shapes = itertools.product(TOKENS, WIDTHS)
    trials = (partial(_product, *shape, device, dtype) for shape in shapes)
    return _with_room(trials, device, deadline)


def attention_rates(
    device: torch.device, dtype: torch.dtype, deadline: float
) -> Iterator[AttentionRate]:
    """As `product_rates`, with the kernels that a run would take."""
    shapes = itertools.product(LENGTHS, HEAD_DIMS)
    trials = (partial(_attention, *shape, device, dtype) for shape in shapes)
    return _with_room(trials, device, deadline)


def _with_room(
    trials: Iterable[Callable[[], Rate]], device: torch.device, deadline: float
) -> Iterator[Rate]:
    for trial in trials:
        if time.monotonic() >= deadline:
            return
        with suppress(torch.OutOfMemoryError):
            yield trial()
        release_cached_memory(device)


def _product(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> ProductRate:
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(EXPANSION * width, width, device=device, dtype=dtype)
    seconds = _seconds(partial(F.linear, x, weight), device)
    flops = 2 * tokens * width * EXPANSION * width
    return ProductRate(tokens=tokens, width=width, flops_per_s=flops / seconds)


def _attention(
    length: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> AttentionRate:
    rows, heads = max(ATTENTION_TOKENS // length, 1), max(ATTENTION_WIDTH // head_dim, 1)
    shape = (rows, heads, length, head_dim)
    query, key, value, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in "qkvg")
    wanted = [each.requires_grad_() for each in (query, key, value)]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with attention_choice(device):
        forward_s = _seconds(forward, device)
        backward = partial(
            torch.autograd.grad, forward(), wanted, grad_outputs=grad, retain_graph=True
        )
        backward_s = _seconds(backward, device)
    flops = 2 * rows * heads * length**2 * head_dim
    return AttentionRate(
        length=length,
        head_dim=head_dim,
        forward_flops_per_s=flops / forward_s,
        backward_flops_per_s=2 * flops / backward_s,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call; the first is not counted, the second says how many more there are."""
    call()
    once = _timed(call, 1, device)
    return _timed(call, max(1, min(MOST_CALLS, int(TRIAL_SECONDS / once))), device)


def _timed(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Mean seconds; on a GPU with the calls behind each other in its queue."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    return (time.perf_counter() - began) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
