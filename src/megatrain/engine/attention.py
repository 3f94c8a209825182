"""Which of torch's attention kernels are taken, where several can be."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""As measured (docs/log.md); each is taken only for what it supports."""


def attention_choice(device: torch.device) -> AbstractContextManager[Any]:
    """The order of preference, for the duration of the context."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(FASTEST_FIRST, set_priority=True)
