"""What a checkpoint holds, and whether it still does.

The manifest lists every file with its size and digest; whatever else is wanted of a checkpoint is
in the files it lists.  It is the last file to be written.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from megatrain.checkpoint.contents import STATE_FOLDER
from megatrain.checkpoint.disk import Disk, FileRecord, record_of
from megatrain.errors import UserError

MANIFEST = f"{STATE_FOLDER}/manifest.json"
STATE = f"{STATE_FOLDER}/state.json"
VERSION = 1
LOADED = ("*.safetensors", "*.safetensors.index.json")
READERS = 4
"""Files that are read at the same time to verify them."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What a run needs beside its tensors to go on."""

    step: int
    """Optimizer steps done, skipped ones included: the position in the data and in the schedule."""
    skipped_steps: int
    tokens_seen: int
    adam_steps: list[int]
    """By block."""
    compute_dtype: str
    num_rows: int
    rows_per_step: int
    data_digest: str
    """Of the content of the training files."""
    config: dict[str, Any]
    trainer_state: dict[str, Any]
    """As `trainer_state.json`."""
    versions: dict[str, str]
    counters: dict[str, Any] = field(default_factory=dict)
    """What the training loop counts; a checkpoint may lack it."""
    loss: str | None = None
    """Qualified name of what was minimised; None where it was not written down."""


def write_manifest(disk: Disk, folder: Path, records: Mapping[str, FileRecord]) -> None:
    """The last file of a checkpoint."""
    files = {name: asdict(record) for name, record in sorted(records.items())}
    text = json.dumps(
        {"version": VERSION, "digest": _digest(files), "files": files}, indent=1
    ).encode()
    disk.write(folder / MANIFEST, text)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files that a checkpoint should hold.

    Raises:
        UserError: if it is no checkpoint, is damaged, or is of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise _damaged(folder, f"no {MANIFEST}: it is no checkpoint, or an unfinished one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, files, digest = content["version"], content["files"], content["digest"]
        records = {name: FileRecord(**record) for name, record in files.items()}
    except OSError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"damage in {MANIFEST}") from error
    if version != VERSION:
        raise UserError(
            asked=f"resume_from_checkpoint: {folder}",
            found=f"version {version} of the format, and a megatrain that reads {VERSION}",
            change="resume with the megatrain that wrote it, or start a new run from its model"
            f" (model_name_or_path: {folder})",
        )
    if digest != _digest(files):
        raise _damaged(folder, f"damage in {MANIFEST}")
    return records


def verify(folder: Path) -> dict[str, FileRecord]:
    """Read every file of a checkpoint and compare it with the manifest.

    Returns:
        The files by their paths in it.

    Raises:
        UserError: naming what is missing or damaged.
    """
    records = read_manifest(folder)
    with ThreadPoolExecutor(READERS) as pool:
        problems = list(pool.map(lambda name: _problem(folder / name, records[name]), records))
    found = [f"{name} {what}" for name, what in zip(records, problems, strict=True) if what]
    found += [f"{name} does not belong to it" for name in _strangers(folder, records)]
    if found:
        raise _damaged(folder, "damage: " + ", ".join(found[:5]) + (" ..." if found[5:] else ""))
    return records


def looks_whole(folder: Path) -> bool:
    """Whether a run could go on from it, as far as names and sizes tell; no tensor is read."""
    try:
        records = read_manifest(folder)
    except UserError:
        return False
    sizes = (_problem(folder / name, record, sizes_only=True) for name, record in records.items())
    return STATE in records and not any(sizes) and not _strangers(folder, records)


def _strangers(folder: Path, records: Mapping[str, FileRecord]) -> list[str]:
    """What would be loaded beside or instead of what was written."""
    found = {str(path.relative_to(folder)) for end in LOADED for path in folder.rglob(end)}
    return sorted(found - records.keys())


def _problem(path: Path, record: FileRecord, *, sizes_only: bool = False) -> str:
    try:
        size = path.stat().st_size
        if size != record.nbytes:
            return f"has {size} bytes instead of {record.nbytes}"
        same = sizes_only or record_of(path) == record
        return "" if same else "has other content than was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def write_state(disk: Disk, folder: Path, state: TrainingState) -> FileRecord:
    """The numbers of a run."""
    return disk.write(folder / STATE, json.dumps(asdict(state), indent=1).encode())


def read_state(folder: Path) -> TrainingState:
    """The numbers of a run; the checkpoint must be verified.

    Raises:
        UserError: if it holds only a model.
    """
    path = folder / STATE
    if not path.is_file():
        raise model_only(folder)
    content = json.loads(path.read_text(encoding="utf-8"))
    known = {each.name for each in fields(TrainingState)}
    return TrainingState(**{name: value for name, value in content.items() if name in known})


def model_only(folder: Path) -> UserError:
    """Of a checkpoint that a run cannot go on from."""
    return UserError(
        asked=f"resume_from_checkpoint: {folder}",
        found="a model without training state (save_only_model)",
        change=f"start a new run from it (model_name_or_path: {folder})",
    )


def _digest(files: Any) -> str:
    return str(xxhash.xxh3_128(json.dumps(files, sort_keys=True).encode()).hexdigest())


def _damaged(folder: Path, found: str) -> UserError:
    return UserError(
        asked=f"resume_from_checkpoint: {folder}",
        found=found,
        change="resume from another checkpoint, or with auto from the last one that is whole",
    )
