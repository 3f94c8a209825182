"""The compute device of a run."""

import torch

from megatrain.errors import UserError

DEVICE_RESERVE = 1 * 2**30
"""Bytes of the GPU beside tensors: CUDA's context, and the libraries' kernels and workspaces."""


def choose_device(name: str) -> torch.device:
    """The compute device of `auto`, `cpu` or `cuda`.

    Raises:
        UserError: for cuda where there is none, or another name.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(
            asked=f"device: {name}", found="no such device", change="use auto, cpu or cuda"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            asked="device: cuda",
            found="no CUDA device that torch can use",
            change="use device: cpu",
        )
    use_cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def limit_device_memory(device: torch.device, nbytes: int) -> None:
    """Refuse tensors beyond so many bytes, so that a budget holds.

    Call it before anything is allocated there: segments of memory then grow where they are, so
    that little of the budget is lost between them.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def release_cached_memory(device: torch.device) -> None:
    """Give back what torch keeps of freed tensors, which another stream could not use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def free_device_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
