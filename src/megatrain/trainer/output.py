"""The output directory of a run: claimed, locked, with room for what will be written."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.checkpoint import (
    BufferPool,
    CheckpointWriter,
    Contents,
    Disk,
    Lock,
    checkpoints,
    masters_of,
    remove,
    remove_remains,
    retire_later,
    save_model,
    verify,
)
from megatrain.checkpoint.contents import Read
from megatrain.checkpoint.writer import SMALL_FILES_BYTES, TRAINER_STATE
from megatrain.config import TrainConfig
from megatrain.errors import UserError
from megatrain.memory import BlockStore
from megatrain.models.parts import join_blocks
from megatrain.planner import DiskUse
from megatrain.preflight import claim_output
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.progress import Progress
from megatrain.units import format_bytes, parse_bytes


class OutputDirectory:
    """Owned by this process from when it is made until it is left as a context manager.

    Raises:
        UserError: if it cannot be written, or another run writes there.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk = path.resolve(), disk
        claim_output(self.path)
        self._lock = Lock(self.path)
        remove_remains(self.path, disk)

    def __enter__(self) -> "OutputDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def check_room(
        self,
        contents: Contents | None,
        *,
        count: int,
        limit: int | None,
        done: int = 0,
        scratch: DiskUse | None = None,
    ) -> str:
        """See that there is room for two checkpoints: the new one is whole before one is removed.

        Where as many are there as are kept, each makes room for the one after the next.

        Args:
            contents: of a checkpoint.
            count: checkpoints yet to be written.
            limit: how many are kept; None: all.
            done: steps of this run, whose checkpoints are there already.
            scratch: room that is needed too, if it is on the same file system.

        Returns:
            A warning if those that are to be kept will not fit; else nothing.

        Raises:
            UserError: if not even the first two fit.
        """
        if contents is None or not count:
            return ""
        one = contents.nbytes + SMALL_FILES_BYTES
        free, beside = self.disk.free_bytes(self.path), ""
        if scratch is not None and _same_file_system(self.path, scratch.tier.path):
            free -= scratch.nbytes
            beside = f" beside {format_bytes(scratch.nbytes)} of scratch space (disk_path)"
        kept = count
        if limit is not None:
            there = sum(step <= done for step in checkpoints(self.path))
            kept = min(count, max(1, limit + 1 - there))
        if free < one * min(kept, 2):
            raise UserError(
                asked=f"checkpoints of {format_bytes(one)} in {self.path}{beside}",
                found=f"{format_bytes(max(free, 0))} free for them, and room for {min(kept, 2)}"
                " is needed",
                change="make room, choose another output_dir, or set save_only_model: true or"
                " save_strategy: no",
            )
        if free >= one * kept:
            return ""
        return (
            f"{kept} checkpoints of {format_bytes(one)} are to be kept, and {format_bytes(free)} is"
            " free: set save_total_limit, or make room"
        )

    def remove_earlier_run(self, note: Callable[[str], None]) -> None:
        """Checkpoints and the state of another run must not pass for this run's."""
        (self.path / TRAINER_STATE).unlink(missing_ok=True)
        for path in checkpoints(self.path).values():
            note(f"{path.name} of an earlier run is removed (overwrite_output_dir)")
            remove(path, self.disk)

    def go_back_to(self, step: int, note: Callable[[str], None]) -> None:
        """Checkpoints after the step that this run goes on from are of another future."""
        for path in retire_later(self.path, step, self.disk):
            note(f"{path.name} is what a later checkpoint is called now; remove it if you will")

    def writer(
        self, config: TrainConfig, run: PreparedRun, store: BlockStore
    ) -> CheckpointWriter | None:
        """What writes this run's checkpoints; None if there are none."""
        if run.contents is None:
            return None
        return CheckpointWriter(
            model=run.blocks.model,
            store=store,
            contents=run.contents,
            output=self.path,
            lock=self._lock,
            tokenizer=run.tokenizer,
            pool=BufferPool(run.memory.checkpoint, pin=run.device.type == "cuda"),
            limit=config.save_total_limit,
            disk=self.disk,
        )

    def write_trainer_state(self, state: dict[str, Any], note: Callable[[str], None]) -> None:
        """As transformers' `save_state` does at the end of a run; no run fails because of it."""
        path = self.path / TRAINER_STATE
        scratch = path.with_suffix(".writing")
        try:
            scratch.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            scratch.replace(path)
        except OSError as error:
            note(f"{path} cannot be written ({error.strerror})")

    def save_model(
        self, config: TrainConfig, run: PreparedRun, store: BlockStore, progress: Progress
    ) -> str:
        """The final model, or that of the best checkpoint; what became of it, in words.

        Raises:
            UserError: if it cannot be written, or another run writes there by now.
        """
        read: Read = partial(join_blocks, run.blocks.model, store.masters)
        source = ""
        best = progress.best(self.path) if config.load_best_model_at_end else None
        if best is not None and progress.best_step != progress.step:
            try:
                verify(best)
                read, source = masters_of(run.blocks.model, best), f", that of {best.name}"
            except UserError as error:
                source = f", the last one and not the best ({best.name}: {error.found})"
        try:
            self.disk.make_directory(self.path)
            self._lock.renew()
            save_model(
                run.blocks.model,
                read,
                self.path,
                dtype=run.compute_dtype if config.save_dtype == "auto" else config.save_dtype,
                max_shard_bytes=parse_bytes(config.max_shard_size),
                tokenizer=run.tokenizer,
                disk=self.disk,
            )
        except OSError as error:
            raise UserError(
                asked=f"the final model in {self.path}",
                found=f"no way to write it ({error.strerror or error})",
                change="make room; megatrain export writes it from the last checkpoint, if there is"
                " one",
            ) from error
        return f"model written to {config.output_dir}{source}"


def _same_file_system(first: Path, second: Path) -> bool:
    return os.stat(first).st_dev == os.stat(second).st_dev
