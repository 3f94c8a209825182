"""Records out of files, each with the place that it came from.

Promise: whatever cannot be read names its file and line and what was expected there.  A .jsonl file
is read line by line; .json and .txt files are held in memory one at a time.
"""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

SUFFIXES = (".jsonl", ".json", ".txt")
BYTE_ORDER_MARK = "\ufeff"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
EXAMPLE = '{"text": "..."}'


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record and where it stands."""

    value: dict[str, Any]
    place: str
    """file:line, or file:item."""


def find_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files of paths, folders and globs: in the order given, sorted within a folder or glob.

    A folder gives its own files of the known kinds, not those of folders inside it; `**` in a glob
    reaches into those.

    Raises:
        UserError: for a path that names no file, or a file of an unknown kind.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    if not listed:
        raise UserError(
            asked="data files", found="an empty list", change=f"name {', '.join(SUFFIXES)} files"
        )
    found = [file for path in listed for file in _matches(str(path))]
    for file in found:
        if file.suffix not in SUFFIXES:
            raise UserError(
                asked=f"data from {file}",
                found=f"a file of kind '{file.suffix}'",
                change=f"use one of {', '.join(SUFFIXES)}",
            )
    return found


def _matches(path: str) -> list[Path]:
    try:
        if Path(path).is_dir():
            matches = [p for p in sorted(Path(path).iterdir()) if p.suffix in SUFFIXES]
        elif Path(path).is_file():
            return [Path(path)]
        else:
            matches = [Path(match) for match in sorted(glob.glob(path, recursive=True))]
        matches = [match for match in matches if match.is_file()]
    except OSError as error:
        raise _unreadable(path, error) from error
    if not matches:
        raise UserError(
            asked=f"data from {path}",
            found="no such file, folder with data files, or match",
            change=f"give a path to {', '.join(SUFFIXES)} files",
        )
    return matches


def read_records(file: Path) -> Iterator[Record]:
    """Records of one file; a .txt file is one record with a `text`.

    Blank lines of a .jsonl file are passed over.

    Raises:
        UserError: naming file and line of what cannot be read.
    """
    if file.suffix == ".jsonl":
        yield from _json_lines(file)
        return
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    text = _decode(content, file, first_line=1, offset=0)
    if file.suffix == ".txt":
        yield Record(value={"text": text}, place=str(file))
    else:
        yield from _json_list(text, file)


def _json_lines(file: Path) -> Iterator[Record]:
    offset = 0
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                line = _decode(raw, file, first_line=number, offset=offset)
                offset += len(raw)
                if line.strip():
                    place = f"{file}:{number}"
                    expected = f"give each line one whole JSON object such as {EXAMPLE}"
                    yield _record(_parse(line, place, expected), place)
    except OSError as error:
        raise _unreadable(file, error) from error


def _json_list(text: str, file: Path) -> Iterator[Record]:
    expected = f"make the file one list of objects, [{EXAMPLE}, ...]"
    several = f"{expected}, or name a file with an object on each line .jsonl"
    items = _parse(text, str(file), several)
    if not isinstance(items, list):
        raise UserError(
            asked=f"data from {file}", found=f"a JSON {type(items).__name__}", change=several
        )
    for number, item in enumerate(items):
        yield _record(item, f"{file}:item {number}")


def _decode(content: bytes, file: Path, *, first_line: int, offset: int) -> str:
    """Text of bytes that begin at `offset` of the file, on line `first_line`."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        wide = not offset and content.startswith(UTF16_MARKS)
        raise UserError(
            asked=f"data from {file}:{line}",
            found=f"bytes that are not UTF-8 at offset {offset + error.start}"
            + (" (the file is UTF-16)" if wide else ""),
            change="convert the file to UTF-8",
        ) from error
    return text if offset else text.removeprefix(BYTE_ORDER_MARK)


def _parse(text: str, place: str, expected: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text.rstrip() else ""
        raise UserError(
            asked=f"JSON at {place}",
            found=f"{error.msg} at {where or f'column {error.colno}'}",
            change=expected,
        ) from error
    except RecursionError as error:
        raise UserError(
            asked=f"JSON at {place}", found="brackets nested too deep", change=expected
        ) from error
    if "\\u" in text.lower():
        _check_surrogates(value, place)
    return value


def _check_surrogates(value: Any, place: str) -> None:
    """JSON may spell half a character, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            asked=f"JSON at {place}",
            found=f"half of a surrogate pair, \\u{ord(error.object[error.start]):04x}",
            change="write the character itself or both halves",
        ) from error


def _record(item: Any, place: str) -> Record:
    if not isinstance(item, dict):
        raise UserError(
            asked=f"a record at {place}",
            found=f"a JSON {type(item).__name__}",
            change=f"make every record an object such as {EXAMPLE}",
        )
    return Record(value=item, place=place)


def _unreadable(path: str | Path, error: OSError) -> UserError:
    return UserError(
        asked=f"data from {path}", found=str(error.strerror), change="make it readable"
    )
