"""`run.json`: what a run was, so that it can be understood and repeated later.

One entry a session: a run that is resumed has several.  Times are the wall clock's, for people.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain import __version__
from megatrain.config import TrainConfig
from megatrain.placing import RunPlan
from megatrain.trainer.prepare import PreparedRun
from megatrain.versions import library_versions

FILE = "run.json"


class RunRecord:
    """The entry of this session; written when it begins and when it ends.

    Args:
        output: the output directory.
        continues: earlier sessions there are of the same run.
        note: told if it cannot be written; the run goes on.
    """

    def __init__(self, output: Path, *, continues: bool, note: Callable[[str], None]) -> None:
        self._path, self._note = output / FILE, note
        self._earlier: list[dict[str, Any]] = []
        if continues and self._path.is_file():
            self._earlier = self._read()
        self._entry: dict[str, Any] = {}

    def _read(self) -> list[dict[str, Any]]:
        """The sessions so far; what is no record (after a power cut) is put aside."""
        try:
            found: list[dict[str, Any]] = json.loads(self._path.read_bytes())["sessions"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            with suppress(OSError):
                self._path.replace(self._path.with_name(f"{FILE}.damaged"))
            self._note(
                f"{FILE} of the earlier sessions cannot be read ({type(error).__name__}): it is"
                f" called {FILE}.damaged now"
            )
            return []
        return found

    def begin(
        self, config: TrainConfig, run: PreparedRun, plan: RunPlan, *, loss: str, step: int
    ) -> None:
        """What is known before the first step; the loss by its name."""
        self._entry = {
            "began": _now(),
            "from_step": step,
            "config": config.model_dump(),
            "loss": loss,
            "versions": {"megatrain": __version__, "python": platform.python_version()}
            | library_versions(),
            "hardware": _hardware(run.device),
            "model": {
                "params": run.blocks.model.num_params,
                "blocks": len(run.blocks.model.blocks),
                "compute_dtype": run.compute_dtype,
            },
            "plan": {
                "host_bytes": plan.need.host,
                "disk": None if plan.disk is None else plan.disk.figures(),
                "words": plan.in_words(),
            },
            "data": {
                "files": {str(path): path.stat().st_size for path in run.data.files},
                "parts": run.data.parts,
                "formats": run.data.formats,
                "digest": run.data.digest,
                "rows": asdict(run.data.stats),
                "held_out_rows": len(run.data.eval_rows),
            },
            "total_steps": run.total_steps,
            "ended": None,
        }
        self._write()

    def end(self, how: str, results: Mapping[str, Any]) -> None:
        """How it ended, and with what figures."""
        self._entry |= {"ended": _now(), "how": how, "results": dict(results)}
        self._write()

    def _write(self) -> None:
        text = json.dumps({"sessions": [*self._earlier, self._entry]}, indent=1)
        scratch = self._path.with_suffix(".writing")
        try:
            scratch.write_text(text + "\n", encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:
            self._note(f"{self._path} cannot be written ({error.strerror})")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found
