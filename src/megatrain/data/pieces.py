"""Text and JSON lists read a piece at a time, so that a file may be larger than memory.

Promise: bytes that are not UTF-8 and JSON that is none are told with their line, as in a file that
is read whole.  Price: a long text is cut into pieces at line ends, and each piece begins a row.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatrain.errors import UserError

CHUNK_BYTES = 2**20
PIECE_CHARACTERS = 2**20
"""Of a text: some 300,000 tokens, for which a tokenizer takes about 200 MB."""
MARKS = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
BYTE_ORDER_MARK = "\ufeff"
WHITE_SPACE = re.compile(r"[ \t\n\r]*")
NEAR_THE_END = 16
"""Characters in which a literal or an escape may have been cut off."""


def text_chunks(stream: BinaryIO, file: Path) -> Iterator[str]:
    """The text of a UTF-8 file, about `CHUNK_BYTES` at a time.

    Raises:
        UserError: naming the line that is not UTF-8.
    """
    offset, line, rest = 0, 1, b""
    while True:
        more = stream.read(CHUNK_BYTES)
        content = rest + more
        stop = _whole_characters(content) if more else len(content)
        if text := decode(content[:stop], file, first_line=line, offset=offset):
            yield text
        if not more:
            return
        offset, line, rest = offset + stop, line + content.count(b"\n", 0, stop), content[stop:]


def decode(content: bytes, file: Path, *, first_line: int, offset: int) -> str:
    """Text of bytes that begin at `offset` of the file, on line `first_line`.

    Raises:
        UserError: naming the line that is not UTF-8.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        wide = not offset and MARKS.get(content[:2])
        raise UserError(
            asked=f"data from {file}:{line}",
            found=f"bytes that are not UTF-8 at offset {offset + error.start}"
            + (f" (the file is {wide})" if wide else ""),
            change="convert the file to UTF-8",
        ) from error
    return text if offset else text.removeprefix(BYTE_ORDER_MARK)


def _whole_characters(content: bytes) -> int:
    """Bytes up to the last character, if that is cut off."""
    for back, byte in enumerate(reversed(content[-4:]), start=1):
        if byte & 0xC0 != 0x80:  # a character begins here
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(content) - back if length > back else len(content)
    return len(content)


def text_pieces(chunks: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """(piece, whether it is the last) of a text, cut behind the last line end that fits."""
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > PIECE_CHARACTERS:
            cut = held.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
            yield held[:cut], False
            held = held[cut:]
    yield held, True


class JsonItems:
    """The items of one JSON list, one after the other.

    Args:
        chunks: the text.
        file: where it comes from, for errors.
        expected: what to change if it is none.
    """

    def __init__(self, chunks: Iterator[str], file: Path, expected: str) -> None:
        self._chunks, self._file, self._expected = chunks, file, expected
        self._text, self._at = "", 0
        self._line, self._column = 1, 1
        """Of the first character of the text that is held."""

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        """(item, its text)."""
        self._take("[")
        if self._next() == "]":
            self._at += 1
        else:
            while True:
                yield self._item()
                if self._take(",]") == "]":
                    break
        if self._next():
            raise self._error("Extra data", self._at)

    def _next(self) -> str:
        """The next character that is no white space; nothing at the end."""
        while True:
            space = WHITE_SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _take(self, wanted: str) -> str:
        found = self._next()
        if not found or found not in wanted:
            name = "Expecting value" if wanted == "[" else "Expecting ',' delimiter"
            raise self._error(name, self._at)
        self._at += 1
        return found

    def _item(self) -> tuple[Any, str]:
        self._next()
        while True:
            try:
                value, stop = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or (
                    error.pos >= len(self._text) - NEAR_THE_END
                )
                within = error.pos - self._at
                if not cut_off or not self._read(len(self._text)):
                    raise self._error(error.msg, self._at + within) from error
            except RecursionError as error:
                raise self._error("brackets nested too deep", self._at) from error
            else:
                # A number may go on in the next chunk; what is wanted, an object, cannot.
                text = self._text[self._at : stop]
                self._at = stop
                return value, text

    def _read(self, characters: int = 1) -> bool:
        """Hold at least so many more characters, if there are any; forget those that are done."""
        done, self._text = self._text[: self._at], self._text[self._at :]
        if "\n" in done:
            self._column = len(done) - done.rfind("\n")
            self._line += done.count("\n")
        else:
            self._column += len(done)
        self._at = 0
        parts, length = [self._text], 0
        for chunk in self._chunks:
            parts.append(chunk)
            length += len(chunk)
            if length >= characters:
                break
        self._text = "".join(parts)
        return length > 0

    def _error(self, message: str, position: int) -> UserError:
        before = self._text[:position]
        line = self._line + before.count("\n")
        column = len(before) - before.rfind("\n") if "\n" in before else len(before) + self._column
        return UserError(
            asked=f"JSON at {self._file}",
            found=f"{message} at line {line}, column {column}",
            change=self._expected,
        )
