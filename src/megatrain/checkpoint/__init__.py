"""Models and training states on disk: whole or not there, written while training goes on."""

from megatrain.checkpoint.contents import Contents
from megatrain.checkpoint.directory import (
    Lock,
    checkpoints,
    instead_of,
    last_whole,
    remove,
    remove_remains,
    retire_later,
)
from megatrain.checkpoint.disk import Disk
from megatrain.checkpoint.export import save_model, write_config
from megatrain.checkpoint.manifest import TrainingState, read_state, verify
from megatrain.checkpoint.restore import cut_steps, join_steps, masters_of, restore_state
from megatrain.checkpoint.snapshot import BufferPool, Snapshot, pool_bytes
from megatrain.checkpoint.writer import CheckpointWriter

__all__ = [
    "BufferPool",
    "CheckpointWriter",
    "Contents",
    "Disk",
    "Lock",
    "Snapshot",
    "TrainingState",
    "checkpoints",
    "cut_steps",
    "instead_of",
    "join_steps",
    "last_whole",
    "masters_of",
    "pool_bytes",
    "read_state",
    "remove",
    "remove_remains",
    "restore_state",
    "retire_later",
    "save_model",
    "verify",
    "write_config",
]
