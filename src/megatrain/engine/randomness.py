"""Random numbers inside a block, keyed so that recompute, another split and resume replay them."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from megatrain.engine.state import StepState
from megatrain.models import BlockModel

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


@dataclass(frozen=True, kw_only=True)
class StepRandomness:
    """The randomness of one block and one micro-batch of a step, the same each time."""

    model: BlockModel
    seed: int
    device: torch.device

    def __call__(
        self, state: StepState, block: int, micro: int, *more: int
    ) -> AbstractContextManager[None]:
        """Nothing is touched where nothing is random.

        Args:
            more: of the key, where a block is computed in several turns.
        """
        if not self.draws(state):
            return nullcontext()
        row = state.micro_batches[micro].first_row
        return keyed_randomness(self.seed, state.step, block, row, *more, device=self.device)

    def draws(self, state: StepState) -> bool:
        """Whether anything is random."""
        return self.model.random and state.training
