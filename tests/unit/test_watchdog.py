"""What is unusual is said once; what is usual is not."""

import math
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.engine.meter import clock_report
from megatrain.monitor import StallWatch
from megatrain.monitor.watchdog import HISTORY, LEAST, SLOW_STEPS, Watchdog


def usual(seed: int = 0) -> tuple[Watchdog, random.Random]:
    dog, draw = Watchdog(), random.Random(seed)
    for step in range(200):
        loss = 2.0 * math.exp(-step / 400) + draw.gauss(0, 0.05)
        assert dog.look(step, loss=loss, seconds=1 + draw.random() * 0.2) == []
    return dog, draw


def test_a_noisy_loss_that_falls_is_usual_for_every_seed() -> None:
    for seed in range(20):
        usual(seed)


def test_a_spike_is_said_once_and_does_not_become_usual() -> None:
    dog, _ = usual()
    said = [dog.look(200 + i, loss=5.0, seconds=1.0) for i in range(20)]
    assert [len(each) for each in said] == [1] + [0] * 19
    assert "loss 5.0000 at step 200: the median of the last 50 is 1." in said[0][0]
    assert dog.in_spike
    assert dog.look(220, loss=1.25, seconds=1.0) == [] and not dog.in_spike
    assert len(dog.look(221, loss=5.0, seconds=1.0)) == 1
    assert dog.look(222, loss=1.25, seconds=1.0) == [] and not dog.in_spike
    assert len(dog.look(223, loss=math.nan, seconds=1.0)) == 1
    for step in range(100):  # never usual
        assert dog.look(224 + step, loss=math.nan, seconds=1.0) == [] and dog.in_spike


def test_a_rise_that_lasts_is_said_once_and_becomes_usual() -> None:
    dog, draw = usual()
    said, spikes = [], []
    for step in range(200, 300):
        said += dog.look(step, loss=5.0 + draw.gauss(0, 0.05), seconds=1.0)
        spikes.append(dog.in_spike)
    assert len(said) == 1 and spikes[:20] == [True] * 20
    assert 20 < spikes.index(False) <= HISTORY and not any(spikes[HISTORY:])
    (again,) = dog.look(300, loss=9.0, seconds=1.0)
    assert "loss 9.0000 at step 300: the median of the last 50 is " in again
    level = float(again.rsplit(" ", 1)[1])
    assert level == pytest.approx(5.0, abs=0.05)
    assert dog.look(301, loss=1.2, seconds=1.0) == [] and not dog.in_spike


def test_a_smooth_loss_has_room_to_rise() -> None:
    dog = Watchdog()
    for step in range(60):
        assert dog.look(step, loss=1.0, seconds=1.0) == []
    assert dog.look(60, loss=1.15, seconds=1.0) == []
    assert len(dog.look(61, loss=1.5, seconds=1.0)) == 1


def test_the_first_steps_are_not_judged() -> None:
    dog = Watchdog()
    for step in range(LEAST):
        assert dog.look(step, loss=10.0**step, seconds=10.0**-step) == []


def test_slow_steps_are_said_once_if_they_last() -> None:
    dog, _ = usual()
    for each in range(SLOW_STEPS - 1):
        assert dog.look(200 + each, loss=1.2, seconds=3.0) == []
    assert dog.look(205, loss=1.2, seconds=1.0) == []
    said = [dog.look(206 + each, loss=1.2, seconds=3.3) for each in range(20)]
    assert sum(map(len, said)) == 1
    assert "3.30 s instead of 1." in said[SLOW_STEPS - 1][0]


def test_steps_that_stay_slow_become_usual() -> None:
    dog, _ = usual()
    said = [text for i in range(60) for text in dog.look(200 + i, loss=1.2, seconds=3.0)]
    assert len(said) == 1 and dog.usual_seconds == 3.0
    said = [text for i in range(10) for text in dog.look(260 + i, loss=1.2, seconds=6.0)]
    assert len(said) == 1 and "6.00 s instead of 3.00 s" in said[0]


def test_why_steps_are_slow_is_asked_for_only_then() -> None:
    asked: list[str] = []

    def explain() -> str:
        asked.append("asked")
        return "the GPU's clock is held down by heat"

    dog = Watchdog(explain=explain)
    for step in range(LEAST):
        assert dog.look(step, loss=1.0, seconds=1.0) == []
    said = [dog.look(LEAST + each, loss=1.0, seconds=3.0) for each in range(SLOW_STEPS)]
    assert asked == ["asked"] and said[-1][0].endswith(": the GPU's clock is held down by heat")


def test_what_a_step_takes_is_known_after_some() -> None:
    dog = Watchdog()
    assert dog.usual_seconds is None
    for step in range(5):
        dog.look(step, loss=1.0, seconds=2.0 + step)
    assert dog.usual_seconds == 4.0


def test_a_step_that_hangs_is_told_while_it_hangs(tmp_path: Path) -> None:
    said: list[str] = []
    with StallWatch(tmp_path, said.append, poll_s=0.01, least_s=0.3) as watch:
        watch.begin(1, None)  # not known: not watched
        time.sleep(0.4)
        watch.end()
        for step in (2, 3):
            watch.begin(step, 0.001)
            time.sleep(0.02)
            watch.end()
        assert said == []
        watch.begin(4, 0.001)
        time.sleep(0.8)
        assert len(said) == 2  # after 0.3 s and again after 0.6 s
        watch.end()
        time.sleep(0.4)
    assert len(said) == 2
    assert said[0].startswith("step 4 has been running for 0 s; one usually takes 0.00 s (what")
    assert "test_watchdog.py" in (tmp_path / "stalled.txt").read_text()


UUID = "1b8f9c2e-0000-0000-0000-000000000005"


class Nvml:
    """pynvml, as far as it is used."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, reasons: int, *, fails: bool = False) -> None:
        self.reasons, self.fails = reasons, fails

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert uuid == f"GPU-{UUID}"
        return uuid

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Any) -> int:  # noqa: N802
        if self.fails:
            raise self.NVMLError
        return self.reasons

    def nvmlDeviceGetClockInfo(self, gpu: Any, kind: int) -> int:  # noqa: N802
        return 1110

    def nvmlDeviceGetMaxClockInfo(self, gpu: Any, kind: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetTemperature(self, gpu: Any, kind: int) -> int:  # noqa: N802
        return 91

    def nvmlDeviceGetPowerUsage(self, gpu: Any) -> int:  # noqa: N802
        return 400_400


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (0x00, "not held down"),
        (0x01, "not held down"),
        (0x40, "held down by heat"),
        (0x24, "held down by heat and the power limit"),
    ],
)
def test_what_holds_the_clock_of_a_gpu_down(
    reasons: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(reasons))
    told = clock_report(torch.device("cuda", 0))
    assert told == f"the GPU's clock is {words} (1110 of 1980 MHz, 91 C, 400 W)"
    assert clock_report(torch.device("cpu")) == ""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(0, fails=True))
    assert clock_report(torch.device("cuda", 0)) == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clock_report(torch.device("cuda", 0)) == ""
