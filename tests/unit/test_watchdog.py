"""What is unusual is said once; what is usual is not."""

import math
import random

from megatrain.monitor.watchdog import LEAST, SLOW_STEPS, Watchdog


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
    said = [dog.look(200 + i, loss=5.0, seconds=1.0) for i in range(100)]
    assert [len(each) for each in said] == [1] + [0] * 99
    assert "loss 5.0000 at step 200: the median of the last 50 is 1." in said[0][0]
    assert dog.in_spike
    assert dog.look(300, loss=1.25, seconds=1.0) == [] and not dog.in_spike
    assert len(dog.look(301, loss=math.nan, seconds=1.0)) == 1


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
