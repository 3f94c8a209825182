"""Random numbers inside a block, keyed so that recompute, another split and resume replay them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# torch's default generator is one for the process.  Engines take turns; no other thread may draw
# from it during a step of a model with dropout.
_ONE_GENERATOR = threading.Lock()


def seed_of(*key: int) -> int:
    """The generator seed of a key (seed, step, block, row)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def keyed_randomness(*key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators from the key (seed, step, block, row); restore them afterwards."""
    devices = [device] if device.type == "cuda" else []
    with _ONE_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(*key))
        yield
