"""What a config says to `megatrain plan`: the model and options of its run, without its data."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.config import TrainConfig
from megatrain.engine import EngineOptions
from megatrain.models import BlockModel
from megatrain.placing import Budgets
from megatrain.planner.answer import state_bytes
from megatrain.trainer.model import (
    checkpoint_memory,
    learning_rate_of,
    load_run_model,
    saved_of,
    size,
    writes_checkpoints,
)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run as far as it is known before its data is."""

    config: TrainConfig
    model: BlockModel
    """Whole layers."""
    options: EngineOptions
    """On a GPU."""

    @property
    def length(self) -> int:
        """Tokens of a row, at most."""
        positions = self.model.learned_positions
        return min(self.config.max_length, positions or self.config.max_length)

    @property
    def disk_memory(self) -> int | None:
        """Bytes for state on a disk; None: no state may be there.

        Of a `disk_path` that is not on this machine `disk_memory` is taken at its word.
        """
        config, room = self.config, size(self.config.disk_memory)
        if config.disk_path is None:
            return None
        path = Path(config.disk_path)
        if room is not None and not path.is_dir():
            return room
        return Budgets(disk_path=path, disk=room).scratch_bytes

    def checkpoint_memory(self, model: BlockModel) -> int:
        """Bytes of the host for checkpoints on their way."""
        return checkpoint_memory(self.config, model)

    def checkpoint_bytes(self, model: BlockModel) -> int:
        """Of one on the disk."""
        if not writes_checkpoints(self.config):
            return 0
        return state_bytes([block.layout for block in model.blocks], saved_of(self.config))


def planned_run(config: TrainConfig) -> PlannedRun:
    """Find and check the model of a run on a GPU, as `train` does, without weights and data.

    Raises:
        UserError: for what `train` refuses of the model, its tokenizer and the options.
    """
    found = load_run_model(config, torch.device("cuda"))
    learning_rate_of(config, total_steps=max(config.max_steps, 1))
    if config.expert_parts is not None:
        found.blocks.in_parts(config.expert_parts)
    return PlannedRun(config=config, model=found.blocks.model, options=found.options)
