"""What a run takes is compared with its plan."""

import pytest

from megatrain.trainer.memory_check import beyond_plan

GIB = 2**30


@pytest.mark.parametrize(
    ("planned", "used", "told"),
    [
        (10, 10.0, False),
        (10, 11.9, False),
        (10, 12.1, True),
        (100, 104.9, False),
        (100, 105.1, True),
        (100, 60.0, False),
    ],
)
def test_a_clear_excess_is_told(planned: int, used: float, told: bool) -> None:
    for name in ("host_memory_gib", "gpu_memory_gib"):
        said = beyond_plan({name: planned * GIB}, {name: used})
        assert bool(said) is told
        assert all(f"set {name[:-4]} lower by" in line for line in said)


def test_on_the_cpu_there_is_nothing_to_compare() -> None:
    assert beyond_plan({}, {"host_memory_gib": 500.0}) == []
