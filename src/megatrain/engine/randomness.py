"""Random numbers inside a block, keyed so that recompute, another split and resume replay them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def keyed_randomness(*key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators from the key (seed, step, block, row); restore them afterwards."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
