"""One JSON object a line, with Hugging Face's names."""

import json
from pathlib import Path
from typing import Any


class RunLog:
    """Appends rows to `log.jsonl`; each is on disk when `write` returns."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "log.jsonl"
        self.path.write_text("")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row.  A number that is not finite becomes null, as JSON has none."""
        clean = {key: _finite(value) for key, value in row.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    is_bad = isinstance(value, float) and (value != value or value in (float("inf"), -float("inf")))
    return None if is_bad else value
