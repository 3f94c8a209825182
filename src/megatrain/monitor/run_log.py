"""One JSON object a line, with Hugging Face's names.

Promise: a row is with the operating system when `write` returns, so a killed run keeps its log.
One that the system refuses (a full disk) is written with a later one, and the run goes on.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "log.jsonl"


class RunLog:
    """Writes `log.jsonl`.

    Args:
        output_dir: an existing directory.
        after_step: keep an earlier log's rows up to this step; None: replace it.
        note: told once when rows cannot be written, and why.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        after_step: int | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        self.path = output_dir / FILE
        self._unwritten: list[str] = []
        self._note = note
        kept = "" if after_step is None else _rows_up_to(self.path, after_step)
        scratch = self.path.with_suffix(".writing")
        scratch.write_text(kept, encoding="utf-8")
        scratch.replace(self.path)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row.  A number that is not finite becomes null, as JSON has none."""
        clean = {key: finite(value) for key, value in row.items()}
        self._unwritten.append(json.dumps(clean, allow_nan=False) + "\n")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                before = file.tell()
                data = "".join(self._unwritten).encode()
                if file.write(data) != len(data):
                    os.ftruncate(file.fileno(), before)
                    return
        except OSError as error:
            if len(self._unwritten) == 1:
                self._note(f"{self.path} cannot be written ({error.strerror}); its rows are kept")
            return
        self._unwritten.clear()


def _rows_up_to(path: Path, step: int) -> str:
    """Whole rows of an earlier log; its last lines may be cut off, or not what was written."""
    if not path.exists():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step:
            kept.append(line + "\n")
    return "".join(kept)


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
