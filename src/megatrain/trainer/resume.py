"""Going on from a checkpoint: which one, and whether it is of this run."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.adviser import Earlier
from megatrain.checkpoint import (
    TrainingState,
    checkpoints,
    cut_steps,
    instead_of,
    last_whole,
    read_state,
    restore_state,
    verify,
    write_config,
)
from megatrain.checkpoint.transformers_optimizer import (
    is_of_transformers,
    read_trainer_state,
    restore_optimizer,
)
from megatrain.config import TrainConfig, changes
from megatrain.errors import UserError
from megatrain.memory import BlockStore, DiskTier
from megatrain.memory.store import DTYPES
from megatrain.models.parts import cut_blocks
from megatrain.models.weights import LoadReport, load_block_weights
from megatrain.trainer.prepare import PreparedRun

NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path")
"""Keys of config.json that say where it came from."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A checkpoint that this run goes on from, verified and of the same run."""

    folder: Path
    state: TrainingState

    @property
    def split(self) -> Earlier | None:
        """Of its steps into micro-batches; None: by rows, or not known."""
        tokens = self.state.config.get("micro_batch_tokens")
        return None if tokens is None else Earlier(checkpoint=self.folder.name, tokens=tokens)

    def load(
        self, run: PreparedRun, *, resident: frozenset[int], disk: DiskTier | None = None
    ) -> BlockStore:
        """The state of every block, one at a time.

        Args:
            run: the same model.
            resident: blocks that live on the device; they may be others than before.
            disk: those that live on the disk; the same.
        """
        model = run.blocks.model
        source = load_block_weights(model.whole, self.folder, LoadReport(), complete=True)
        source = cut_blocks(model, source)
        layouts = [block.layout for block in model.blocks]
        store = BlockStore.filled(layouts, source, device=run.device, resident=resident, disk=disk)
        if is_of_transformers(self.folder):
            restore_optimizer(store, model, self.folder)
        else:
            restore_state(store, model, self.folder)
            store.adam_steps[:] = cut_steps(model, self.state.adam_steps)
        return store


def may_resume(config: TrainConfig) -> bool:
    """Whether there is a checkpoint to go on from, damaged or not.

    Raises:
        UserError: if there must be one and there is none.
    """
    asked = config.resume_from_checkpoint
    if not asked:
        return False
    if asked not in (True, "auto"):
        return True
    found = bool(checkpoints(Path(config.output_dir)))
    if asked is True and not found:
        raise UserError(
            asked="resume_from_checkpoint: true",
            found=f"no checkpoint in {config.output_dir}",
            change="give a checkpoint's directory, or say auto to begin if there is none",
        )
    return found


def resume(
    config: TrainConfig, run: PreparedRun, *, loss: str, note: Callable[[str], None]
) -> Resumption | None:
    """Find the checkpoint, verify every file of it, and compare it with the run.

    Args:
        config: of the run.
        run: the same, prepared.
        loss: name of what it minimises.
        note: told what has changed.

    Raises:
        UserError: if it is damaged, or the run would be another one.
    """
    asked = config.resume_from_checkpoint
    if isinstance(asked, str) and asked != "auto":
        folder: Path | None = Path(asked)
        if is_of_transformers(Path(asked)):
            return _of_transformers(Path(asked), run, note)
        _verify_or_offer(Path(asked))
    else:
        folder = last_whole(Path(config.output_dir), note)
    if folder is None:
        return None
    state = read_state(folder)
    if state.loss not in (None, loss):
        note(f"changed since {folder.name}: loss: {loss}, was {state.loss}")
    _check_same_run(folder, state, config, run, note)
    note(f"going on from {folder} after step {state.step}")
    return Resumption(folder=folder, state=state)


def _of_transformers(folder: Path, run: PreparedRun, note: Callable[[str], None]) -> Resumption:
    """Weights, moments and the step; its order of the data is not ours, its options are unknown."""
    state = read_trainer_state(folder)
    _check_steps(folder, state.step, run)
    note(
        f"going on from {folder}, which transformers' Trainer wrote, after step {state.step}: its"
        " model and optimizer; order of the data and all options are those of this run"
    )
    return Resumption(folder=folder, state=state)


def _verify_or_offer(folder: Path) -> None:
    """Verify; if that fails, say which other one could be taken."""
    try:
        verify(folder)
    except UserError as error:
        if (other := instead_of(folder)) is None:
            raise
        change = f"resume from {other}, or with auto from the last one that is whole"
        raise UserError(asked=error.asked, found=error.found, change=change) from error


def _check_same_run(
    folder: Path,
    state: TrainingState,
    config: TrainConfig,
    run: PreparedRun,
    note: Callable[[str], None],
) -> None:
    refused, told = changes(state.config, config)
    found = {
        "dtype": (run.compute_dtype, state.compute_dtype),
        "rows a step": (run.sampler.rows_per_step, state.rows_per_step),
        "rows to train on": (run.sampler.num_rows, state.num_rows),
    }
    refused += [f"{name}: {now}, was {was}" for name, (now, was) in found.items() if now != was]
    if not refused and run.data.digest != state.data_digest:
        refused.append(
            "other rows from train_files: their content or weights, the tokenizer or its template"
        )
    refused += _model_changes(folder, run)
    if refused:
        raise UserError(
            asked=f"resume_from_checkpoint: {folder}",
            found=f"another run ({'; '.join(refused)})",
            change="go back to the config in training_state/config.yaml there, or start a new run"
            f" from its model (model_name_or_path: {folder}, without resume_from_checkpoint)",
        )
    if state.versions.get("torch") != torch.__version__:
        told.append(f"torch: {torch.__version__}, was {state.versions.get('torch')}")
    if told:
        note(f"changed since {folder.name}: {'; '.join(told)}")
    _check_steps(folder, state.step, run)


def _check_steps(folder: Path, done: int, run: PreparedRun) -> None:
    if done > run.total_steps:
        raise UserError(
            asked=f"resume_from_checkpoint: {folder} with {run.total_steps} steps in all",
            found=f"{done} steps done",
            change="raise max_steps or num_train_epochs",
        )


def _model_changes(folder: Path, run: PreparedRun) -> list[str]:
    """Differences between the config.json of a checkpoint and that of this run's model."""
    with tempfile.TemporaryDirectory() as scratch:
        write_config(run.blocks.model, Path(scratch), dtype=DTYPES[run.compute_dtype])
        now, was = (_plain_config(Path(path)) for path in (scratch, folder))
    differing = sorted(key for key in now | was if now.get(key) != was.get(key))
    return [f"{key} of the model: {now.get(key)}, was {was.get(key)}" for key in differing]


def _plain_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
