"""Short runs whose last checkpoints can be compared, and a disk that can be told to fail."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from megatrain.checkpoint.disk import Data, Disk, DiskFile
from megatrain.config import make_config
from megatrain.trainer import Trainer

KEYS: dict[str, Any] = {
    "model_name_or_path": "models/base",
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_length": 64,
    "max_steps": 8,
    "save_steps": 2,
    "logging_steps": 1,
    "max_shard_size": "20KB",
}
"""24 rows: an epoch is six steps."""
MEASURED = frozenset(
    {
        "tokens_per_second",
        "tflops_6n",
        "mfu_6n",
        "limiting_lane",
        "limiting_lane_busy",
        "gpu_memory_gib",
        "host_memory_gib",
        "seconds_left",
        "eval_runtime",
        "eval_samples_per_second",
        "eval_steps_per_second",
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
    }
)
"""Figures of a row that are about this machine at this moment: no two runs share them."""


def trainer(*, disk: Disk | None = None, **changes: Any) -> Trainer:
    config, _ = make_config(KEYS | changes)
    return Trainer(config, quiet=True, disk=disk)


def train(*, disk: Disk | None = None, **changes: Any) -> Trainer:
    made = trainer(disk=disk, **changes)
    made.train()
    return made


class OnRow(TrainerCallback):
    """Gives each row of the log to a function."""

    def __init__(self, act: Callable[[dict[str, Any]], None]) -> None:
        self.act = act

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **others: Any
    ) -> None:
        self.act({"step": state.global_step} | logs)


class Stopped(Exception):  # noqa: N818  no error: a run that ends in the middle
    """Raised where a run is to end."""


def train_until(step: int, **changes: Any) -> None:
    """The run ends within the step after this one, as if its process had been killed."""
    made = trainer(**changes)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] > step:
            raise Stopped

    made.add_callback(OnRow(stop))
    with pytest.raises(Stopped):
        made.train()


def tensors_of(checkpoint: Path) -> dict[str, str]:
    """Digest by file of everything that holds tensors."""
    files = json.loads((checkpoint / "training_state/manifest.json").read_text())["files"]
    return {name: at["digest"] for name, at in files.items() if name.endswith(".safetensors")}


def numbers_of(checkpoint: Path) -> dict[str, Any]:
    """The run's numbers; not how fast it was."""
    state: dict[str, Any] = json.loads((checkpoint / "training_state/state.json").read_text())
    del state["config"]
    for row in state["trainer_state"]["log_history"]:
        for name in MEASURED:
            row.pop(name, None)
    return state


class ScriptedDisk(Disk):
    """Records every operation; `before` may raise, or look."""

    def __init__(self, before: Callable[[str, Path], None] | None = None) -> None:
        self.log: list[tuple[str, Path]] = []
        self._before = before

    def _do(self, what: str, path: Path) -> None:
        if self._before is not None:
            self._before(what, path)
        self.log.append((what, path))

    def create(self, path: Path) -> DiskFile:
        self._do("create", path)
        return _ScriptedFile(path, self._do)

    def adopt(self, path: Path) -> Any:
        self._do("close", path)
        return super().adopt(path)

    def make_directory(self, path: Path) -> None:
        self._do("mkdir", path)
        super().make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", target)
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._do("sync", path)
        super().sync_directory(path)

    def remove(self, path: Path) -> None:
        if path.exists():
            self._do("remove", path)
        super().remove(path)


class _ScriptedFile(DiskFile):
    def __init__(self, path: Path, do: Callable[[str, Path], None]) -> None:
        super().__init__(path)
        self._path, self._do = path, do

    def write(self, data: Data) -> None:
        self._do("write", self._path)
        super().write(data)

    def close(self) -> Any:
        self._do("close", self._path)
        return super().close()


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
