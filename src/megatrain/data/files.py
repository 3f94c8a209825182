"""Records out of files, each with the place that it came from."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

SUFFIXES = (".jsonl", ".json", ".txt")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record and where it stands."""

    value: dict[str, Any]
    place: str
    """file:line, or file:item."""


def find_files(paths: Sequence[str]) -> list[Path]:
    """Files of paths, folders and globs, in a fixed order.

    Raises:
        UserError: for a path that names no file, or a file of an unknown kind.
    """
    found: list[Path] = []
    for path in paths:
        if Path(path).is_dir():
            matches = [p for p in sorted(Path(path).iterdir()) if p.suffix in SUFFIXES]
        elif Path(path).is_file():
            matches = [Path(path)]
        else:
            matches = [Path(match) for match in sorted(glob.glob(path)) if Path(match).is_file()]
        if not matches:
            raise UserError(
                asked=f"data from {path}",
                found="no such file, folder with data files, or match",
                change=f"give a path to {', '.join(SUFFIXES)} files",
            )
        found += matches
    for file in found:
        if file.suffix not in SUFFIXES:
            raise UserError(
                asked=f"data from {file}",
                found=f"a file of kind '{file.suffix}'",
                change=f"use one of {', '.join(SUFFIXES)}",
            )
    return found


def read_records(file: Path) -> Iterator[Record]:
    """Records of one file; a .txt file is one record with a `text`.

    Raises:
        UserError: naming file and line of what cannot be read.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            asked=f"data from {file}",
            found=f"bytes that are not UTF-8 at offset {error.start}",
            change="convert the file to UTF-8",
        ) from error
    except OSError as error:
        raise UserError(
            asked=f"data from {file}", found=str(error.strerror), change="make it readable"
        ) from error
    if file.suffix == ".txt":
        yield Record(value={"text": text}, place=str(file))
    elif file.suffix == ".json":
        items = _parse(text, str(file))
        if not isinstance(items, list):
            raise UserError(
                asked=f"data from {file}",
                found=f"a JSON {type(items).__name__}",
                change="make it a list of objects",
            )
        for number, item in enumerate(items):
            yield _record(item, f"{file}:item {number}")
    else:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _record(_parse(line, f"{file}:{number}"), f"{file}:{number}")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            asked=f"JSON at {place}",
            found=f"{error.msg} at column {error.colno}",
            change="mend that line",
        ) from error


def _record(item: Any, place: str) -> Record:
    if not isinstance(item, dict):
        raise UserError(
            asked=f"a record at {place}",
            found=f"a JSON {type(item).__name__}",
            change='make every record an object such as {"text": "..."}',
        )
    return Record(value=item, place=place)
