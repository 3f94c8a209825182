"""The compute device of a run."""

import warnings

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
    with warnings.catch_warnings(record=True) as told:  # such as of a driver that is too old
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        built = torch.version.cuda is not None
        reason = f": {' '.join(str(told[0].message).split())}" if told else ""
        raise UserError(
            asked="device: cuda",
            found=f"no CUDA device that torch can use{reason}"
            if built
            else f"torch {torch.__version__}, which is built without CUDA",
            change="use device: cpu"
            if built
            else "install a CUDA build of torch (https://pytorch.org), or use device: cpu",
        )
    use_cuda = usable and name != "cpu"
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
    """Give back what torch keeps of freed tensors: on the device, where another stream could not
    use it, and page-locked on the host, where compiling leaves gigabytes (kernels that add in place
    are tried on tensors that are put aside there).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def free_device_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
