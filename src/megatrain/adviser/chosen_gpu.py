"""The GPU that a plan is for: named, or the one in this machine."""

import re

import torch

from megatrain.engine.kept_rates import stored_calibration
from megatrain.errors import UserError
from megatrain.hardware import GPUS, Gpu, find_gpu


def gpu_called(name: str) -> Gpu:
    """One of those whose figures are published.

    Raises:
        UserError: for a name that none has, or several.
    """
    several = re.search(r"[,;+]|\b\d+ *x\b", name, re.IGNORECASE)  # one only, or all compared
    found = None if several else find_gpu(name)
    if found is None:
        raise UserError(
            asked=f"--gpu {name}",
            found="no GPU of that name is known",
            change=f"use one of {', '.join(GPUS)}",
        )
    return found


def gpu_here() -> Gpu:
    """The GPU of this machine.

    Raises:
        UserError: if there is none, or one that is neither known by name nor calibrated.
    """
    known = ", ".join(GPUS)
    if not torch.cuda.is_available():
        raise UserError(
            asked="a plan for this machine",
            found="no GPU in it",
            change=f"name one with --gpu ({known}; or all, to compare them)",
        )
    name = torch.cuda.get_device_name(0)
    found = known_gpu(name)
    if found is None:
        raise UserError(
            asked="a plan for this machine",
            found=f"a {name}, whose rates are not known here",
            change=f"measure them with megatrain bench --calibrate, or name one like it with --gpu"
            f" ({known})",
        )
    return found


def known_gpu(name: str) -> Gpu | None:
    """A GPU of this machine: as published or, if it is not, as measured; None if neither."""
    return find_gpu(name) or _measured_gpu(name)


def _measured_gpu(name: str) -> Gpu | None:
    kept = stored_calibration().found
    if kept is None or kept.gpu is None or not kept.gpu.products:
        return None
    return Gpu(
        name=name,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        memory_bytes_per_s=kept.gpu.device_bytes_per_s,
        bf16_flops_per_s=max(each.flops_per_s for each in kept.gpu.products),
        link_bytes_per_s=min(kept.gpu.h2d_alone_bytes_per_s, kept.gpu.d2h_alone_bytes_per_s),
        power_w=None,
        source="megatrain bench --calibrate",
    )
