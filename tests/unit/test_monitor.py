"""What a run shows, and what stands in its log."""

import errno
import io
import json
import math
import os
import re
from pathlib import Path

import pytest

from megatrain.monitor import Console, RunLog, Throughput

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


def test_a_log_that_a_power_cut_has_spoiled_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    good = b'{"step": 1}\n'
    (tmp_path / "log.jsonl").write_bytes(good + b'\xff\xfe\n7\n[]\n{"step": null}\n\0\0\0')
    RunLog(tmp_path, after_step=3)
    assert (tmp_path / "log.jsonl").read_bytes() == good


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


def test_all_figures_are_shown_and_those_that_are_not_known_left_out() -> None:
    out = io.StringIO()
    more = {
        "clip_rate": 0.25,
        "tflops_6n": 421.04,
        "mfu_6n": 0.612,
        "limiting_lane": "compute",
        "gpu_memory_gib": 120.06,
        "host_memory_gib": 60.0,
    }
    with Console(9, file=out) as console:
        console.step(ROW | more, seconds_left=5.0)
    assert out.getvalue() == (
        "step 3/9  loss 1.2500  grad norm 0.500  clipped 25%  lr 1.00e-04  1,234 tokens/s"
        "  421 TFLOPS  MFU 61%  limited by compute  GPU 120.1 GiB  host 60.0 GiB  0:00:05 left\n"
    )


def test_what_routers_do_has_a_line_of_its_own() -> None:
    out = io.StringIO()
    more = {"router_entropy": 0.913, "expert_load_max": 3.26, "experts_unused": 4}
    with Console(9, file=out) as console:
        console.step(ROW | more, seconds_left=5.0)
    found = "router entropy 0.91  busiest expert 3.3x  unused experts 4  0:00:05 left\n"
    assert out.getvalue().endswith(found)


def test_a_terminal_has_a_display_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with Console(9, file=out) as console:
        console.note("a note")
        console.advance(3)
        console.step(ROW, seconds_left=5.0)
        console.advance(4)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "a note" in text
    assert text.count("loss 1.2500  grad norm 0.500  lr 1.00e-04\n1,234 tokens/s") >= 1
    assert re.search(r"step 4/9 .*0:00:05 left", text)


class Failing(io.StringIO):
    """Refuses text while it is told to."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error: OSError | None = error

    def flush(self) -> None:
        if self.error is not None:
            self.truncate(0)
            self.seek(0)
            raise self.error


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_no_run_ends_because_its_words_cannot_be_shown(
    code: int, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output that goes to a file on a full disk, a terminal that has gone."""
    if live:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("FORCE_COLOR", "1")
    out = Failing(OSError(code, os.strerror(code)))
    with Console(9, file=out) as console:
        console.note("lost")
        console.step(ROW, seconds_left=5.0)
        out.error = None
        console.note("shown")
        assert "shown" in out.getvalue() and "lost" not in out.getvalue()
        out.error = OSError(code, os.strerror(code))


def test_a_reader_that_has_gone_ends_no_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out, Console(9, file=out) as console:
        console.note("lost")
        console.note("lost as well")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_cannot_be_encoded_or_is_said_to_a_closed_stream_ends_no_run(encoding: str) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    with Console(9, file=out) as console:
        console.note("from /data/\udcff/\u00e9")  # a name that is no UTF-8, one that is not ASCII
        shown = "from /data/?/?\n" if encoding == "ascii" else "from /data/?/\u00e9\n"
        assert raw.getvalue().decode(encoding) == shown
        out.close()
        console.note("lost")


def test_rates_are_of_training_alone_and_since_the_row_before() -> None:
    now = [100.0]
    of = Throughput(10, flops_per_token=6e9, matmul_flops_per_s=1e12, clock=lambda: now[0])
    of.add(50, rows=4)
    now[0] += 7.0
    of.leave_out(2.0)
    assert of.figures() == {"tokens_per_second": 10.0, "tflops_6n": 0.06, "mfu_6n": 0.06}
    of.add(30, rows=2)
    now[0] += 1.0
    assert of.figures() == {"tokens_per_second": 30.0, "tflops_6n": 0.18, "mfu_6n": 0.18}
    assert of.seconds_left(14, 20) == pytest.approx(8.0 / 4 * 6)
    assert of.totals() == {
        "train_runtime": 8.0,
        "train_samples_per_second": 0.75,
        "train_steps_per_second": 0.25,
    }


def test_what_is_not_known_of_the_machine_is_no_figure() -> None:
    assert set(Throughput(0, flops_per_token=1.0).figures()) == {"tokens_per_second", "tflops_6n"}
    assert set(Throughput(0, matmul_flops_per_s=1.0).figures()) == {"tokens_per_second"}


def test_quiet_shows_nothing() -> None:
    out = io.StringIO()
    with Console(9, file=out, quiet=True) as console:
        console.note("text")
        console.step(ROW, seconds_left=1.0)
    assert out.getvalue() == ""
