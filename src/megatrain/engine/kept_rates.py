"""What `megatrain bench --calibrate` has measured, in one file for each machine.

Promise: a file is written whole or not at all.  What is damaged, of another format, or was measured
with other software is told in one line and not used; it never ends a run.
"""

import json
import math
import os
import platform
import re
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from megatrain.data import default_cache_dir
from megatrain.engine.device import choose_device
from megatrain.engine.rates import disk_rates, measure_rates
from megatrain.errors import UserError
from megatrain.schedule import AttentionRate, ProductRate, Rates

FORMAT = 1
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What rates depend on."""

    gpu: str | None
    """Its name and UUID."""
    cpu: str
    cores: int
    """That this process may use."""
    torch: str
    driver: str | None
    """Version; None without a GPU, or where the system does not say."""


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Bytes a second, both ways at once."""

    path: str
    """Directory on it."""
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """Of copies, memory and computation."""

    h2d_alone_bytes_per_s: float
    d2h_alone_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    """Both ways at once."""
    device_bytes_per_s: float
    """Its memory, read and written."""
    products: tuple[ProductRate, ...]
    attention: tuple[AttentionRate, ...]
    """bf16; shapes without room, or time, are left out."""

    def beside(self, update_params_per_s: float) -> Rates:
        """With a host that updates so fast."""
        return Rates(
            update_params_per_s=update_params_per_s,
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            device_bytes_per_s=self.device_bytes_per_s,
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, and when."""

    format: int = FORMAT
    day: date
    machine: Machine
    update_params_per_s: float
    """Of the host, in a run."""
    disk: DiskRates
    gpu: GpuRates | None

    def disk_rates(self, folder: Path) -> tuple[float, float] | None:
        """Bytes a second read and written there, both at once; None if it was another disk."""
        measured = Path(self.disk.path)
        if not measured.is_dir() or not folder.is_dir():
            return None
        if measured.stat().st_dev != folder.stat().st_dev:
            return None
        return self.disk.read_bytes_per_s, self.disk.write_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is kept for this machine, and what a user should hear of it."""

    found: Calibration | None
    words: str = ""
    """Empty if nothing is kept."""

    def words_of_disk(self, folder: Path) -> str:
        """Where only a disk's rates count: empty if another one was measured."""
        return "" if self.found and self.found.disk_rates(folder) is None else self.words


def calibration_file(machine: Machine) -> Path:
    """Beside the cache of tokenised data; other software on the same machine has the same file."""
    name = f"{machine.gpu or 'no-gpu'}-{machine.cpu}-{machine.cores}-cores"
    plain = re.sub("[^a-z0-9]+", "-", name.lower())
    return default_cache_dir().parent / "rates" / f"{plain}.json"


def this_machine() -> Machine:
    """The one that this process runs on."""
    with_gpu = choose_device("auto").type == "cuda"
    gpu = torch.cuda.get_device_properties(0) if with_gpu else None
    return Machine(
        gpu=None if gpu is None else f"{gpu.name} GPU-{gpu.uuid}",
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
        driver=None if gpu is None else _driver_version(),
    )


def stored_calibration() -> Stored:
    """What is kept, if it can be used."""
    machine = this_machine()
    path = calibration_file(machine)
    try:
        found = _parsed(path.read_text())
    except FileNotFoundError:
        return Stored(found=None)
    except OSError as error:
        return _unusable(path, f"cannot be read ({error.strerror})")
    except (ValueError, KeyError, TypeError, RecursionError):
        return _unusable(path, "are damaged")
    if found is None:
        return _unusable(path, "are of another version's format")
    now = asdict(machine)
    other = {key: old for key, old in asdict(found.machine).items() if old != now[key]}
    if other:
        differ = ", ".join(f"{key} {old} (now {now[key]})" for key, old in other.items())
        return _unusable(path, f"were measured with {differ}")
    words = f"rates measured on {found.day} by bench --calibrate (disk: {found.disk.path})"
    return Stored(found=found, words=f"{words}; to forget them delete {path}")


def run_rates(device: torch.device, *, host_threads: int | None) -> Rates:
    """Of a run on the GPU: kept, or else measured, as they are with updates on so many threads."""
    kept = stored_calibration().found
    if kept is None or kept.gpu is None or host_threads is not None:
        return measure_rates(device, host_threads=host_threads)
    return kept.gpu.beside(kept.update_params_per_s)


def run_disk_rates(folder: Path, room: int) -> tuple[float, float]:
    """Bytes a second read and written there, both at once: kept, or else measured.

    Args:
        folder: on the disk.
        room: bytes that may be used for a trial.
    """
    kept = stored_calibration().found
    found = None if kept is None else kept.disk_rates(folder)
    return found or disk_rates(folder, room)


def _unusable(path: Path, why: str) -> Stored:
    words = f"warning: the stored rates in {path} {why} and are not used; measure them anew with"
    return Stored(found=None, words=f"{words} megatrain bench --calibrate")


def _parsed(text: str) -> Calibration | None:
    """None for another format.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: for what `store` does not write.
    """
    if json.loads(text)["format"] != FORMAT:
        return None
    found = TypeAdapter(Calibration).validate_json(text, strict=True)
    if not _all_positive(asdict(found)) or (found.gpu is None) != (found.machine.gpu is None):
        raise ValueError
    return found


def _all_positive(value: Any) -> bool:
    """Whether every number in it is one, and above 0."""
    if isinstance(value, dict):
        return all(map(_all_positive, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_all_positive, value))
    return not isinstance(value, int | float) or 0 < value < math.inf


def check_storable(machine: Machine) -> None:
    """Before anything is measured.

    Raises:
        UserError: if what is found could not be kept.
    """
    _write(calibration_file(machine), None)


def store(found: Calibration) -> Path:
    """Keep it, in place of what was kept before; the file.

    Raises:
        UserError: if it cannot be written.
    """
    path = calibration_file(found.machine)
    _write(path, TypeAdapter(Calibration).dump_json(found, indent=2))
    return path


def _write(path: Path, content: bytes | None) -> None:
    """Whole or not at all; without content, only whether it could be."""
    beside = path.with_name(f".{path.stem[:100]}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content or b"")
        if content is None:
            beside.unlink()
        else:
            beside.replace(path)
    except OSError as error:
        raise UserError(
            asked=f"--calibrate: {path}",
            found=f"it cannot be written ({error.strerror})",
            change="set XDG_CACHE_HOME to a directory that can",
        ) from error


def _driver_version() -> str | None:
    if not DRIVER.is_file():
        return None
    found = re.search(r"\b\d+\.\d+[.\d]*\b", DRIVER.read_text())
    return None if found is None else found[0]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
