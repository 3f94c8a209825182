"""Write what `megatrain plan` prints behind the commands of docs/memory.md that show it.

    python scripts/generate_plans_docs.py

Run it from the repository's root after a change to the planner; a test compares.
"""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from megatrain.cli import app

PLANS = Path("docs/memory.md")
SHOWN = re.compile(
    r"(```bash\n\.venv/bin/megatrain (?P<command>plan [^\n]*)\n```\n\n```\n)"
    r"(?P<output>.*?)(?=```\n)",
    re.DOTALL,
)
"""A command in a block of its own, and its output in the next one."""


def printed(shown: re.Match[str]) -> str:
    """The same two blocks with what the command prints now."""
    result = CliRunner().invoke(app, shlex.split(shown["command"]))
    if result.exit_code:
        raise SystemExit(f"{shown['command']}: {result.output}")
    return shown[1] + result.stdout


if __name__ == "__main__":
    PLANS.write_text(SHOWN.sub(printed, PLANS.read_text()))
