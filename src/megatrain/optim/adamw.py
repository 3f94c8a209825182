"""AdamW in one written formula (Loshchilov and Hutter 2019, arXiv:1711.05101).

In the order of `torch.optim.AdamW(foreach=False)`, every operation rounded to fp32 by itself:

    g      = float32(gradient) * gradient_scale
    master = master * (1 - lr * weight_decay)
    m      = m + (g - m) * (1 - beta1)
    v      = v * beta2 + (g * g) * (1 - beta2)
    master = master - (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))

No fused multiply-add, no fast math, IEEE division and root: so the host kernel, the device
kernel and the reference give the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamWHyper:
    """Scalars of one update of one segment."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Adam's count, from 1."""
    gradient_scale: float
    """Clip factor; 1 leaves the gradient as it is."""


@dataclass(frozen=True, kw_only=True)
class SegmentBuffers:
    """Flat, contiguous tensors of one length, on one device, updated in place."""

    weight: Tensor
    """bf16, or the fp32 master itself."""
    residual: Tensor | None
    """int16; None exactly if `weight` is fp32."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    """fp32 moments."""
    gradient: Tensor
    """bf16 or fp32."""


def check_buffers(buffers: SegmentBuffers) -> None:
    """Refuse buffers that a kernel would read out of bounds or misread.

    Raises:
        ValueError: for lengths, dtypes, devices or strides that do not belong together.
    """
    given = {name: tensor for name, tensor in vars(buffers).items() if tensor is not None}
    weight, split = buffers.weight, buffers.residual is not None
    wanted = {
        "weight": {torch.bfloat16 if split else torch.float32},
        "residual": {torch.int16},
        "exp_avg": {torch.float32},
        "exp_avg_sq": {torch.float32},
        "gradient": {torch.bfloat16, torch.float32},
    }
    for name, tensor in given.items():
        if tensor.dtype not in wanted[name]:
            raise ValueError(f"{name} is {tensor.dtype}, not one of {wanted[name]}")
        if tensor.shape != (weight.numel(),) or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, weight {weight.numel()}")
        if tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device}, weight on {weight.device}")


Updater = Callable[[SegmentBuffers, AdamWHyper], None]


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The formula's constants, computed in fp64 and rounded to fp32 once, for all three kernels."""

    scale: np.float32
    decay: np.float32
    weight1: np.float32
    beta2: np.float32
    weight2: np.float32
    root_correction2: np.float32
    eps: np.float32
    step_size: np.float32


def scalars(hyper: AdamWHyper) -> Scalars:
    """Constants of one update."""
    correction1 = 1.0 - hyper.beta1**hyper.step
    correction2 = 1.0 - hyper.beta2**hyper.step
    return Scalars(
        scale=np.float32(hyper.gradient_scale),
        decay=np.float32(1.0 - hyper.learning_rate * hyper.weight_decay),
        weight1=np.float32(1.0 - hyper.beta1),
        beta2=np.float32(hyper.beta2),
        weight2=np.float32(1.0 - hyper.beta2),
        root_correction2=np.float32(correction2**0.5),
        eps=np.float32(hyper.eps),
        step_size=np.float32(hyper.learning_rate / correction1),
    )
