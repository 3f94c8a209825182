"""What a run shows, and what stands in its log."""

import io
import json
import math
from pathlib import Path

from megatrain.monitor import Console, RunLog

ROW = {
    "step": 3,
    "loss": 1.25,
    "grad_norm": 0.5,
    "learning_rate": 1e-4,
    "tokens_per_second": 1234.5,
    "epoch": 0.1,
}


def test_the_log_is_json_lines_and_rows_are_readable_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.write({"step": step, "loss": 0.5})
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))


def test_what_is_not_finite_is_null_and_everything_else_is_kept(tmp_path: Path) -> None:
    row = {"loss": math.nan, "grad_norm": math.inf, "other": -math.inf, "skipped": True, "step": 1}
    RunLog(tmp_path).write(row)
    found = json.loads((tmp_path / "log.jsonl").read_text())
    assert found == {"loss": None, "grad_norm": None, "other": None, "skipped": True, "step": 1}


def test_an_earlier_log_is_replaced(tmp_path: Path) -> None:
    RunLog(tmp_path).write({"step": 1})
    RunLog(tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_without_a_terminal_every_step_is_a_plain_line() -> None:
    out = io.StringIO()
    with Console(9, file=out) as console:
        console.note("path [with] brackets")
        console.step(ROW, seconds_left=3723.4)
    assert out.getvalue().splitlines() == [
        "path [with] brackets",
        "step 3/9  loss 1.2500  grad norm 0.500  lr 1.00e-04  1,234 tokens/s  1:02:03 left",
    ]


def test_quiet_shows_nothing() -> None:
    out = io.StringIO()
    with Console(9, file=out, quiet=True) as console:
        console.note("text")
        console.step(ROW, seconds_left=1.0)
    assert out.getvalue() == ""
