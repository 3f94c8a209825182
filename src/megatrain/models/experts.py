"""Experts' grouped products whose gathers have gathers as gradients (`gathered`).

transformers' `grouped_mm` picks each token's row for each of its experts by indexing, and a bias
for each row.  The gradient of an index is a scatter that adds row by row, of a bias thousands into
one.  But a token has exactly K rows: the gradient of its row is a gather by the inverse order and a
sum of K; that of biases is a product with the rows' experts in one-hot form.

Promise: the forward is transformers' bit for bit; gradients differ by the order of summation, and
are the same from run to run.
Price: with biases the one-hot form, as many numbers as rows times experts.

Shape legend: T tokens, K experts of a token, S = T x K rows, E experts, D hidden size, N columns.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

GATHERED = "gathered"
"""Its name as transformers' `experts_implementation`."""
DISPATCHED = "is_transposed"
"""An attribute that transformers gives all experts that its implementations compute."""


class _Spread(torch.autograd.Function):
    """x_TD -> a row for each token and expert, in the experts' order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.num_tokens = x_TD.shape[0]
        return x_TD[order_S // (order_S.shape[0] // x_TD.shape[0])]

    @staticmethod
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_S,) = ctx.saved_tensors
        by_token = gradient_SD[inverse_S].view(ctx.num_tokens, -1, gradient_SD.shape[-1])
        return by_token.sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows_SN: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        return rows_SN[order_S]

    @staticmethod
    def backward(ctx: Any, gradient_SN: Tensor) -> tuple[Tensor, None, None]:
        (inverse_S,) = ctx.saved_tensors
        return gradient_SN[inverse_S], None, None


class _AddBias(torch.autograd.Function):
    """To each row the bias of its expert; rows of other experts have none."""

    @staticmethod
    def forward(ctx: Any, rows_SN: Tensor, bias_EN: Tensor, expert_S: Tensor) -> Tensor:
        ctx.save_for_backward(expert_S)
        ctx.num_experts = bias_EN.shape[0]
        return rows_SN + bias_EN[expert_S.clamp(max=bias_EN.shape[0] - 1)]

    @staticmethod
    def backward(ctx: Any, gradient_SN: Tensor) -> tuple[Tensor, Tensor, None]:
        (expert_S,) = ctx.saved_tensors
        every_E = torch.arange(ctx.num_experts, device=expert_S.device)
        one_hot_ES = (expert_S == every_E[:, None]).to(gradient_SN.dtype)
        return gradient_SN, one_hot_ES @ gradient_SN, None


def gathered_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers' `grouped_mm_experts_forward` computes.

    Args:
        self: a module of fused experts, as `use_experts_implementation` makes it.
        hidden_states: (T, D).
        top_k_index: (T, K); experts of other parts have the number E.
        top_k_weights: (T, K).
    """
    experts: Any = self  # of transformers 5.17: some attributes came later
    expert_S, order_S = torch.sort(top_k_index.reshape(-1), stable=True)
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
    every_E = torch.arange(experts.num_experts, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, every_E, right=True, out_int32=True)
    in_parts = getattr(experts, "_is_expert_parallel", False)
    elsewhere = (expert_S >= experts.num_experts)[:, None] if in_parts else None

    def only_here(rows_SN: Tensor) -> Tensor:
        """Products leave rows of other parts' experts as they were in memory, backward too."""
        return rows_SN if elsewhere is None else rows_SN.masked_fill(elsewhere, 0.0)

    def product(rows_SN: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        weight = weight if experts.is_transposed else weight.transpose(-2, -1)
        rows_SN = F.grouped_mm(rows_SN.to(weight.dtype), weight, offs=ends_E)
        if experts.has_bias:
            rows_SN = _AddBias.apply(rows_SN, getattr(experts, f"{name}_bias"), expert_S)
        return only_here(rows_SN)

    rows_SD = only_here(_Spread.apply(hidden_states, order_S, inverse_S))
    if experts.has_gate:
        rows_SN = experts._apply_gate(product(rows_SD, "gate_up_proj"))
    else:
        rows_SN = experts.act_fn(product(rows_SD, "up_proj"))
    rows_SD = product(rows_SN, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        rows_SD = experts.post_expert_norm(rows_SD)
    rows_SD = _Permute.apply(rows_SD, inverse_S, order_S)
    weighted_TKD = rows_SD.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted_TKD.sum(dim=1).to(hidden_states.dtype)


def offer_gathered_experts() -> None:
    """Make it known to transformers."""
    ExpertsInterface.register(GATHERED, gathered_experts_forward)
