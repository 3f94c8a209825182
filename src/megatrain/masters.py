"""An exact fp32 master in four bytes: a bf16 weight and an int16 residual.

    bits(master) = (bits(weight) << 16) + residual        (32-bit integers, wrapping)

The weight is the master rounded to the nearest bf16, ties away from zero, so that the residual
always fits 16 bits.  Every fp32 value survives bit for bit, and the bf16 compute copy costs nothing
extra.  Price: the bf16 copy of a NaN may look finite (0x7FFFFFFF rounds up to -0), so what is not
finite is caught in the gradients, before an update.
"""

import torch
from torch import Tensor


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16 weight, int16 residual) of fp32 masters of any shape, on any device."""
    bits = master.contiguous().view(torch.int32)
    residual = bits.to(torch.int16)  # the low 16 bits; negative means that the weight rounds up
    weight = ((bits >> 16) + (residual < 0)).to(torch.int16)
    return weight.view(torch.bfloat16), residual


def join_master(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 masters of bf16 weights and int16 residuals of one shape."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + residual.to(torch.int32)).view(torch.float32)
