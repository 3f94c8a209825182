"""Records out of files, each with the place that it came from.

Promise: whatever cannot be read names its file and line and what was expected there.  Lines of
.jsonl and .csv, items of .json, pieces of .txt and batches of .parquet and .arrow are read one
after the other, so that a file may be larger than memory.  What is compressed is decompressed on
the way.
"""

import bz2
import csv
import glob
import gzip
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from megatrain.data.pieces import JsonItems, decode, text_chunks, text_pieces
from megatrain.data.tables import TABLES, read_table
from megatrain.errors import UserError

COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
"""What opens a compressed file, by the last part of its name."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".json", ".txt", *DELIMITERS, *TABLES)
EXAMPLE = '{"text": "..."}'


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record and where it stands."""

    value: dict[str, Any]
    place: str
    """file:line, or file:item."""
    begins: bool = True
    """Not so if it is a later piece of a long text; and likewise:"""
    ends: bool = True
    plain: bool = False
    """Of a .txt file, which has no columns: its text is under `text`."""


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
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
        if not _is_known(file):
            raise UserError(
                asked=f"data from {file}",
                found=f"a file of kind '{''.join(file.suffixes[-2:])}'",
                change=f"use one of {', '.join(SUFFIXES)}; the first five also compressed as"
                f" {', '.join(COMPRESSIONS)}",
            )
    return found


def kind_of(file: Path) -> str:
    """One of `SUFFIXES` (or something else); what compresses it is left out."""
    return Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix


def _is_known(file: Path) -> bool:
    kind = kind_of(file)
    return kind in SUFFIXES and not (kind in TABLES and file.suffix in COMPRESSIONS)


def _matches(path: str) -> list[Path]:
    try:
        if Path(path).is_dir():
            matches = [p for p in sorted(Path(path).iterdir()) if _is_known(p)]
        elif Path(path).is_file():
            return [Path(path)]
        else:
            matches = [Path(match) for match in sorted(glob.glob(path, recursive=True))]
        matches = [match for match in matches if match.is_file()]
    except OSError as error:
        raise unreadable(path, error) from error
    if not matches:
        raise UserError(
            asked=f"data from {path}",
            found="no such file, folder with data files, or match",
            change=f"give a path to {', '.join(SUFFIXES)} files",
        )
    return matches


def read_records(file: Path) -> Iterator[Record]:
    """Records of one file; a .txt file is one record with a `text`, a long one several pieces.

    Blank lines of a .jsonl or .csv file are passed over; every value of a .csv file is text.

    Raises:
        UserError: naming file and line of what cannot be read.
    """
    kind = kind_of(file)
    if kind in TABLES:
        for number, value in enumerate(read_table(file)):
            yield Record(value=value, place=f"{file}:row {number}")
        return
    try:
        with _open(file) as stream:
            if kind == ".jsonl":
                yield from _json_lines(stream, file)
            elif kind in DELIMITERS:
                yield from _delimited(stream, file, DELIMITERS[kind])
            elif kind == ".txt":
                yield from _text(stream, file)
            else:
                yield from _json_list(stream, file)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise unreadable(file, error) from error


def _open(file: Path) -> BinaryIO:
    stream: BinaryIO = COMPRESSIONS.get(file.suffix, _plain)(file)
    return stream


def _plain(file: Path) -> BinaryIO:
    return file.open("rb")


def _text(stream: BinaryIO, file: Path) -> Iterator[Record]:
    line = 1
    for number, (piece, last) in enumerate(text_pieces(text_chunks(stream, file))):
        place = f"{file}:{line}" if number or not last else str(file)
        yield Record(value={"text": piece}, place=place, begins=not number, ends=last, plain=True)
        line += piece.count("\n")


def _lines(stream: BinaryIO, file: Path) -> Iterator[str]:
    offset = 0
    for number, raw in enumerate(stream, start=1):
        yield decode(raw, file, first_line=number, offset=offset)
        offset += len(raw)


def _json_lines(stream: BinaryIO, file: Path) -> Iterator[Record]:
    for number, line in enumerate(_lines(stream, file), start=1):
        if line.strip():
            place = f"{file}:{number}"
            expected = f"give each line one whole JSON object such as {EXAMPLE}"
            yield _record(_parse(line, place, expected), place)


def _delimited(stream: BinaryIO, file: Path, delimiter: str) -> Iterator[Record]:
    """Rows under a line of column names; a cell may hold line breaks if it is quoted."""
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(_lines(stream, file), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            missing = [name for name, cell in row.items() if cell is None]
            if None in row or missing:
                raise csv.Error("more cells than columns" if None in row else "too few cells")
            yield Record(value=dict(row), place=f"{file}:{rows.line_num}")
    except csv.Error as error:
        raise UserError(
            asked=f"a row of {file}:{rows.line_num}",
            found=str(error),
            change="begin with a line of column names, quote cells that hold"
            f" {'commas' if delimiter == ',' else 'tabs'}, quotes or line breaks, and double quotes"
            " in them",
        ) from error


def _json_list(stream: BinaryIO, file: Path) -> Iterator[Record]:
    expected = f"make the file one list of objects, [{EXAMPLE}, ...]"
    several = f"{expected}, or name a file with an object on each line .jsonl"
    chunks = text_chunks(stream, file)
    start = next(chunks, "")
    while not start.strip() and (more := next(chunks, "")):
        start += more
    if not start.lstrip().startswith("["):
        value = _parse("".join([start, *chunks]), str(file), several)
        raise UserError(
            asked=f"data from {file}", found=f"a JSON {type(value).__name__}", change=several
        )
    for number, (item, text) in enumerate(JsonItems(chain([start], chunks), file, several)):
        place = f"{file}:item {number}"
        if "\\u" in text.lower():
            _check_surrogates(item, place)
        yield _record(item, place)


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


def unreadable(path: str | Path, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.strerror is not None:
        return UserError(asked=f"data from {path}", found=error.strerror, change="make it readable")
    return UserError(
        asked=f"data from {path}",
        found=f"compressed data that is damaged or cut off ({error})",
        change="compress or copy it again",
    )
