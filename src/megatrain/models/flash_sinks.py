"""Causal attention with sinks as one operation of PyTorch, with its gradients.

A sink is a logit of each head that takes part in the softmax and has no value.  PyTorch's flash
kernel knows none, but returns the log of the softmax's sum: with the sink added to that sum the
output is smaller by a factor, and the kernel's backward, given that sum and that output, makes the
gradients of the softmax with the sink.  The kernel is for GPUs in half precision; elsewhere the
same is computed from all scores.

It is an operation of its own so that no trace looks into it: the kernel's own gradient would be
that of attention without sinks.

Shape legend: B rows, H heads, K of keys, T queries, S keys, D of a head.
"""

from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@torch.library.custom_op("megatrain::causal_with_sinks", mutates_args=())
def causal_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention in which the last query sees the last key.

    Args:
        query: (B, T, H, D).
        key, value: (B, S, K, D).
        sinks: (H).
        window: keys that a query sees, its own included; 0: all before it.
        scale: of scores.

    Returns:
        The output (B, T, H, D), and the log of the softmax's sum (B, H, T) in fp32.
    """
    if _has_kernel(query):
        output, lse_BHT, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_whole_rows(query, key), False, **_options(window, scale)
        )
        with_sink_BHT = torch.logaddexp(lse_BHT, sinks.float()[:, None])
        share_BTH1 = torch.exp(lse_BHT - with_sink_BHT).transpose(1, 2)[..., None]
        return (output * share_BTH1).to(output.dtype).contiguous(), with_sink_BHT
    scores_BHTS = _scores(query, key, window, scale)
    with_sink_BHT = torch.logaddexp(scores_BHTS.logsumexp(-1), sinks.float()[:, None])
    share_BHTS = torch.exp(scores_BHTS - with_sink_BHT[..., None]).to(value.dtype)
    output = torch.einsum("bhts,bshd->bthd", share_BHTS, _for_heads(value, query))
    return output.contiguous(), with_sink_BHT


@causal_with_sinks.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = query.shape
    lse = query.new_empty((rows, heads, queries), dtype=torch.float32)
    return query.new_empty(query.shape), lse


@torch.library.custom_op("megatrain::causal_with_sinks_backward", mutates_args=())
def _causal_with_sinks_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    output: Tensor,
    with_sink_BHT: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    along_BHT = (gradient.float() * output.float()).sum(dim=-1).transpose(1, 2)
    sink_share_BHT = torch.exp(sinks.float()[:, None] - with_sink_BHT)
    of_sinks = -(sink_share_BHT * along_BHT).sum(dim=(0, 2)).to(sinks.dtype)
    if _has_kernel(query):
        no_dropout = [query.new_empty(size, dtype=torch.uint64) for size in ((2,), ())]
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(),
            query,
            key,
            value,
            output,
            with_sink_BHT,
            *_whole_rows(query, key),
            *no_dropout,
            **_options(window, scale),
        )
    else:
        heads_of_key = (*key.shape[:3], query.shape[2] // key.shape[2], key.shape[3])
        scores_BHTS = _scores(query, key, window, scale)
        share_BHTS = torch.exp(scores_BHTS - with_sink_BHT[..., None])
        of_share_BHTS = torch.einsum("bthd,bshd->bhts", gradient, _for_heads(value, query))
        of_scores_BHTS = scale * share_BHTS * (of_share_BHTS - along_BHT[..., None])
        share_BHTS, of_scores_BHTS = (each.to(query.dtype) for each in (share_BHTS, of_scores_BHTS))
        of_query = torch.einsum("bhts,bshd->bthd", of_scores_BHTS, _for_heads(key, query))
        of_key = torch.einsum("bhts,bthd->bshd", of_scores_BHTS, query)
        of_value = torch.einsum("bhts,bthd->bshd", share_BHTS, gradient)
        of_key, of_value = (each.reshape(heads_of_key).sum(dim=3) for each in (of_key, of_value))
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous(), of_sinks


@_causal_with_sinks_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    output: Tensor,
    with_sink_BHT: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value, sinks))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _causal_with_sinks_backward(gradient, *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*gradients, None, None)


causal_with_sinks.register_autograd(_backward, setup_context=_keep)
WITH_SINKS = torch.ops.megatrain.causal_with_sinks
"""What a trace calls it."""


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in HALF


def _whole_rows(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """Arguments of the kernel: nothing packed, T, S, no dropout, causal."""
    return None, None, query.shape[1], key.shape[1], 0.0, True


def _options(window: int, scale: float) -> dict[str, Any]:
    sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    return {"scale": scale, **sides}


def _for_heads(key_BSKD: Tensor, query: Tensor) -> Tensor:
    """(B, S, H, D): each key for all its queries' heads."""
    return key_BSKD.repeat_interleave(query.shape[2] // key_BSKD.shape[2], dim=2)


def _scores(query: Tensor, key: Tensor, window: int, scale: float) -> Tensor:
    """(B, H, T, S) in fp32; minus infinity where a query does not see a key."""
    heads_BSHD = _for_heads(key, query)
    product_BHTS = torch.einsum("bthd,bshd->bhts", query.float(), heads_BSHD.float())
    behind = key.shape[1] - query.shape[1]
    ages_TS = (
        torch.arange(query.shape[1], device=key.device)[:, None]
        + behind
        - torch.arange(key.shape[1], device=key.device)
    )
    unseen_TS = (ages_TS < 0) | (ages_TS >= (window or key.shape[1]))
    return (scale * product_BHTS).masked_fill(unseen_TS, -torch.inf)
