"""AdamW for blocks whose state lives on the GPU: one Triton kernel, the reference's bits.

Division and root are the correctly rounded ones and contraction is off, so that a block may live
on either side without changing a result.
"""

from functools import cache
from typing import Any

import torch

from megatrain.optim.adamw import AdamWHyper, SegmentBuffers, check_buffers, scalars

BLOCK = 1024


@cache
def _kernel() -> Any:
    """Compile on first use: Triton exists only beside a CUDA build of torch."""
    import triton
    import triton.language as tl

    globals().update(tl=tl)  # the kernel's body looks names up in the module

    @triton.jit
    def adamw(
        weight, residual, m_ptr, v_ptr, g_ptr, count,
        scale, decay, weight1, beta2, weight2, root_correction2, eps, step_size,
        SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
        if SPLIT:
            high = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
            low = tl.load(residual + at, mask=inside, other=0).to(tl.int32)
            master = (high + low).to(tl.float32, bitcast=True)
        else:
            master = tl.load(weight + at, mask=inside, other=0.0)
        m = tl.load(m_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        master = master * decay
        m = m + (g - m) * weight1
        v = v * beta2 + (g * g) * weight2
        denominator = tl.div_rn(tl.sqrt_rn(v), root_correction2) + eps
        master = master - tl.div_rn(m, denominator) * step_size
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(v_ptr + at, v, mask=inside)
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
            tl.store(residual + at, low.to(tl.int16), mask=inside)
            tl.store(weight + at, ((bits - low) >> 16).to(tl.int16), mask=inside)
        else:
            tl.store(weight + at, master, mask=inside)

    return adamw


def device_update(buffers: SegmentBuffers, hyper: AdamWHyper) -> None:
    """Update one segment of CUDA tensors in place, on the current stream."""
    check_buffers(buffers)
    count = buffers.weight.numel()
    if count == 0:
        return
    c = scalars(hyper)
    split = buffers.residual is not None
    with torch.cuda.device(buffers.weight.device):
        _kernel()[((count + BLOCK - 1) // BLOCK,)](
            buffers.weight.view(torch.int16) if split else buffers.weight,
            buffers.residual if split else buffers.weight,
            buffers.exp_avg, buffers.exp_avg_sq, buffers.gradient, count,
            float(c.scale), float(c.decay), float(c.weight1), float(c.beta2), float(c.weight2),
            float(c.root_correction2), float(c.eps), float(c.step_size),
            SPLIT=split, BLOCK=BLOCK, enable_fp_fusion=False,
        )
