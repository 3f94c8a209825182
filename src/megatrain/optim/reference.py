"""AdamW in plain torch operations, each rounded by itself; CPU or CUDA tensors."""

import numpy as np
import torch
from torch import Tensor

from megatrain.masters import join_master, split_master
from megatrain.optim.adamw import AdamWHyper, SegmentBuffers, check_buffers, scalars


@torch.no_grad()
def reference_update(buffers: SegmentBuffers, hyper: AdamWHyper) -> None:
    """Update one segment in place.  Price: several fp32 temporaries of the segment's size."""
    check_buffers(buffers)
    c = scalars(hyper)
    gradient = buffers.gradient.float() * float(c.scale)
    master = (
        buffers.weight
        if buffers.residual is None
        else join_master(buffers.weight, buffers.residual)
    )
    m, v = buffers.exp_avg, buffers.exp_avg_sq
    master.mul_(float(c.decay))
    m.add_((gradient - m).mul_(float(c.weight1)))
    v.mul_(float(c.beta2)).add_((gradient * gradient).mul_(float(c.weight2)))
    # Division by a tensor: torch would turn division by a Python number into a product.
    denominator = _root(v).div_(torch.full_like(v, float(c.root_correction2))).add_(float(c.eps))
    master.sub_((m / denominator).mul_(float(c.step_size)))
    if buffers.residual is not None:
        weight, residual = split_master(master)
        buffers.weight.copy_(weight)
        buffers.residual.copy_(residual)


def _root(v: Tensor) -> Tensor:
    """Correctly rounded square root; torch's own on the CPU (MKL) is off in the last bit."""
    return v.sqrt() if v.is_cuda else torch.from_numpy(np.sqrt(v.numpy()))
