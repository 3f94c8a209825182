"""AdamW on the host: one numba sweep over a segment, 26 bytes of DRAM traffic a parameter.

Unscale, clip, decay, moments and the bf16 weight in one pass, without the GIL, on several
threads.  `fastmath` stays off: then LLVM neither contracts nor reorders, and the result equals
the reference bit for bit.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import intrinsic

from megatrain.optim.adamw import AdamWHyper, SegmentBuffers, Updater, check_buffers, scalars

CHUNK = 16384  # parameters a task; large enough to hide scheduling, small enough to balance

# error_model: IEEE division by zero instead of a branch to Python's exception, which would keep
# LLVM from vectorising.
COMPILE = {
    "nogil": True,
    "fastmath": False,
    "error_model": "numpy",
    "cache": True,
}

# numba's fallback threading layer, workqueue, ends the process if two threads call it at once, and
# one sweep saturates DRAM: so sweeps take turns.
_ONE_SWEEP = threading.Lock()


@intrinsic
def _as_float(typing_context, bits):
    """The fp32 number with these 32 bits; numba has no bit cast of its own."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def _as_bits(typing_context, value):
    """The 32 bits of an fp32 number."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@njit(**COMPILE)
def _chunk_bf16(weight, residual, m, v, g, shift, c):
    """weight, residual: int16 bits; g: gradient bits, `shift` bits short of fp32's 32."""
    for i in range(weight.size):
        gradient = _as_float(np.int32(np.int32(g[i]) << shift)) * c[0]
        bits = np.int32(np.int32(np.int32(weight[i]) << np.int32(16)) + np.int32(residual[i]))
        master = _as_float(bits) * c[1]
        first = m[i] + (gradient - m[i]) * c[2]
        second = v[i] * c[3] + (gradient * gradient) * c[4]
        m[i] = first
        v[i] = second
        master = master - (first / (np.sqrt(second) / c[5] + c[6])) * c[7]
        bits = _as_bits(master)
        low = np.int16(bits)
        residual[i] = low
        weight[i] = np.int16(np.int32(bits - np.int32(low)) >> np.int32(16))


@njit(**COMPILE)
def _chunk_fp32(master, m, v, g, shift, c):
    """master: fp32; g and shift as in `_chunk_bf16`."""
    for i in range(master.size):
        gradient = _as_float(np.int32(np.int32(g[i]) << shift)) * c[0]
        decayed = master[i] * c[1]
        first = m[i] + (gradient - m[i]) * c[2]
        second = v[i] * c[3] + (gradient * gradient) * c[4]
        m[i] = first
        v[i] = second
        master[i] = decayed - (first / (np.sqrt(second) / c[5] + c[6])) * c[7]


@njit(parallel=True, **COMPILE)
def _sweep_bf16(weight, residual, m, v, g, shift, c):
    for chunk in prange((weight.size + CHUNK - 1) // CHUNK):
        at = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, weight.size))
        _chunk_bf16(weight[at], residual[at], m[at], v[at], g[at], shift, c)


@njit(parallel=True, **COMPILE)
def _sweep_fp32(master, m, v, g, shift, c):
    for chunk in prange((master.size + CHUNK - 1) // CHUNK):
        at = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, master.size))
        _chunk_fp32(master[at], m[at], v[at], g[at], shift, c)


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """numba's OpenMP layer changes the calling thread's OpenMP setting, which torch shares.

    Torch would then split its matrix products differently, which changes their last bits.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def default_threads() -> int:
    """All cores that this process may use but two (they launch work), at least one."""
    return max(len(os.sched_getaffinity(0)) - 2, 1)


def threading_notice() -> str | None:
    """What a user should hear of numba's threads, which are started; None if all is well."""
    with _torch_threads_kept():
        numba.get_num_threads()  # it chooses its threading layer here, in a few milliseconds
    if numba.threading_layer() != "workqueue":
        return None
    return (
        "updates run on numba's unsafe threading layer, workqueue: it ends the process if two threads"
        " call numba at once. Updates take turns; parallel numba code of your own, as in a callback,"
        " must not run beside them. Install libgomp (apt: libgomp1) or the package tbb, and do not"
        " set NUMBA_THREADING_LAYER=workqueue"
    )


def host_updater(threads: int | None = None) -> Updater:
    """An updater for host tensors on `threads` threads (see `default_threads`)."""
    wanted = default_threads() if threads is None else threads
    count = min(wanted, numba.config.NUMBA_NUM_THREADS)

    def update(buffers: SegmentBuffers, hyper: AdamWHyper) -> None:
        check_buffers(buffers)
        c = scalars(hyper)
        # A tuple, not an array: scalars cannot alias the buffers that the loop writes.
        constants = (
            c.scale,
            c.decay,
            c.weight1,
            c.beta2,
            c.weight2,
            c.root_correction2,
            c.eps,
            c.step_size,
        )
        wide = buffers.gradient.dtype is torch.float32
        gradient = buffers.gradient.view(torch.int32 if wide else torch.int16).numpy()
        shift = np.int32(0 if wide else 16)
        m, v = buffers.exp_avg.numpy(), buffers.exp_avg_sq.numpy()
        with _ONE_SWEEP, _torch_threads_kept():
            numba.set_num_threads(count)
            if buffers.residual is None:
                _sweep_fp32(buffers.weight.numpy(), m, v, gradient, shift, constants)
            else:
                weight = buffers.weight.view(torch.int16).numpy()
                _sweep_bf16(weight, buffers.residual.numpy(), m, v, gradient, shift, constants)

    return update
