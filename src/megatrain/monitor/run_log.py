"""One JSON object a line, with Hugging Face's names.

Promise: a row is with the operating system when `write` returns, so a killed run keeps its log.
"""

import json
import math
from pathlib import Path
from typing import Any


class RunLog:
    """Writes `log.jsonl`.

    Args:
        output_dir: an existing directory; an earlier log in it is replaced.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "log.jsonl"
        self.path.write_text("")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row.  A number that is not finite becomes null, as JSON has none."""
        clean = {key: _finite(value) for key, value in row.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
