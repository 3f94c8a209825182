"""From a run's state to `checkpoint-N`: starts a snapshot and, when it is written, gives it a name.

The directory is a Hugging Face model with the training state in a folder of its own.
"""

import errno
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from torch import Tensor

from megatrain.checkpoint.contents import STATE_FOLDER, Contents
from megatrain.checkpoint.directory import Lock, name_while_writing, publish, rotate
from megatrain.checkpoint.disk import Disk
from megatrain.checkpoint.export import adopt_small_files, write_small_files
from megatrain.checkpoint.manifest import STATE, TrainingState, write_manifest, write_state
from megatrain.checkpoint.snapshot import BufferPool, Snapshot
from megatrain.checkpoint.tensors import TensorFiles
from megatrain.data.tokenizer import Tokenizer
from megatrain.memory import BlockStore
from megatrain.memory.store import DTYPES
from megatrain.models import BlockModel
from megatrain.models.parts import join_blocks

CONFIG = f"{STATE_FOLDER}/config.yaml"
TRAINER_STATE = "trainer_state.json"
SMALL_FILES_BYTES = 2**26
"""Room for config, tokenizer and the like."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWriter:
    """Writes checkpoints of one run; one at a time."""

    model: BlockModel
    store: BlockStore
    contents: Contents
    """What is overwritten first stands first."""
    output: Path
    lock: Lock
    """Of `output`."""
    tokenizer: Tokenizer
    pool: BufferPool
    limit: int | None
    """Checkpoints that are kept."""
    disk: Disk

    @property
    def nbytes(self) -> int:
        """Of one checkpoint's tensors."""
        return self.contents.nbytes

    def start(self, state: TrainingState, *, best: Path | None) -> Snapshot:
        """Write the state as it is now; nothing may be pending.

        Args:
            state: the run's numbers.
            best: a checkpoint that is not to be removed.

        Raises:
            OSError: if there is no room or no way to write.
            UserError: if another run writes there by now.
        """
        self.disk.make_directory(self.output)  # somebody may have removed it
        self.lock.renew()
        free = self.disk.free_bytes(self.output)
        if free < self.nbytes + SMALL_FILES_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folder = self.output / name_while_writing(state.step)
        undo = partial(self._undo, folder)
        try:
            self._begin(folder, state)
        except Exception:  # libraries raise what they like when a disk is full
            undo()
            raise
        files = TensorFiles(self.disk, folder, self.contents.files)
        return Snapshot(
            contents=self.contents,
            weights=self._weights,
            store=self.store,
            files=files,
            pool=self.pool,
            complete=partial(self._complete, folder, files, state, best),
            undo=undo,
        )

    def _begin(self, folder: Path, state: TrainingState) -> None:
        """The directory, and in it what libraries write: not from a thread."""
        self.disk.remove(folder)
        self.disk.make_directory(folder / STATE_FOLDER)
        write_small_files(
            self.model,
            folder,
            dtype=DTYPES[state.compute_dtype],
            tokenizer=self.tokenizer,
            contents=self.contents,
        )
        (folder / CONFIG).write_text(yaml.safe_dump(state.config, sort_keys=False))
        text = json.dumps(state.trainer_state, indent=2, sort_keys=True) + "\n"
        (folder / TRAINER_STATE).write_text(text)

    def _undo(self, folder: Path) -> None:
        with suppress(OSError):  # what cannot be removed now is removed before the next attempt
            self.disk.remove(folder)

    def _weights(self, block: int) -> dict[str, Tensor]:
        return join_blocks(self.model, self.store.weights, block)

    def _complete(
        self, folder: Path, files: TensorFiles, state: TrainingState, best: Path | None
    ) -> str:
        """The last steps, in the writing thread; what a person should hear of."""
        assert files.records.keys() == self.contents.files.keys(), "not all files are complete"
        known = dict(files.records)
        if self.contents.state_files:
            known[STATE] = write_state(self.disk, folder, state)
        records = adopt_small_files(self.disk, folder, known)
        write_manifest(self.disk, folder, records)
        publish(folder, self.output, state.step, self.disk)
        try:
            rotate(self.output, self.disk, limit=self.limit, keep=best)
        except OSError as error:  # the checkpoint is written all the same
            return f"an older checkpoint could not be removed ({error})"
        return ""
