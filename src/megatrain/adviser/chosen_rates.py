"""The rates that a plan is made with: given, kept by `bench --calibrate`, or as published."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.engine.kept_rates import GpuRates, stored_calibration
from megatrain.engine.rates import host_update_rate
from megatrain.hardware import Gpu
from megatrain.planner.durations import UPDATE_BYTES
from megatrain.planner.estimate import compute_in_steps, compute_of
from megatrain.schedule import ComputeRates


@dataclass(frozen=True, kw_only=True)
class GivenRates:
    """Said by the user; None for what is known otherwise."""

    host_bandwidth: int | None = None
    """Bytes a second of copying in the host's memory, read and written."""
    disk: int | None = None
    """Bytes a second, read and written at once."""


def known_rates(
    given: GivenRates, disk_path: str | None, *, here: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    """Rates of a `Question`; what was given comes first, then what is kept.

    Args:
        given: by the user; the host's updates are timed now if need be.
        disk_path: directory of a run; None for the disk whose rates are kept.
        here: whether the plan is for the GPU in this machine; a machine that is only named has
            nothing to do with what was measured here, but for the host's updates.
        note: is told if kept rates are used, or cannot be.
    """
    stored = stored_calibration() if here else None
    if stored is not None and stored.words:
        note(stored.words)
    kept = None if stored is None else stored.found
    if given.host_bandwidth is not None:
        updates = given.host_bandwidth / UPDATE_BYTES
    else:
        updates = host_update_rate() if kept is None else kept.update_params_per_s
    disk: float | None = given.disk
    if disk is None and kept is not None:
        rates = kept.disk_rates(Path(disk_path or kept.disk.path))
        disk = None if rates is None else min(rates)
    return {
        "update_params_per_s": updates,
        "measured": None if kept is None else kept.gpu,
        "disk_bytes_per_s": disk,
    }


def compute_of_gpu(gpu: Gpu, measured: GpuRates | None) -> ComputeRates:
    """Of a GPU in whole steps, as far as it was measured."""
    published = compute_of(gpu)
    if measured is None:
        return published
    found = compute_in_steps(ComputeRates(products=measured.products, attention=measured.attention))
    return ComputeRates(
        products=found.products or published.products,
        attention=found.attention or published.attention,
    )
