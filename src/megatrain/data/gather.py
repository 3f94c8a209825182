"""Chunks of rows to one data set, in memory or in mapped files.

Promise: the rows, and their digest, are the same wherever they are gathered.  Price: 8 bytes a
token and 8 a row, of memory or of the disk.
"""

import os
from array import array
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatrain.data.rows import DatasetStats, RowChunk, TokenizedRows

FILES: dict[str, np.dtype[Any]] = {
    "input_ids": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
    "offsets": np.dtype(np.int64),
}
"""In the order of the digest."""
READ_BYTES = 2**22


class Gathered:
    """Rows gathered in memory."""

    def __init__(self) -> None:
        self._ids, self._weights, self._offsets = array("i"), array("f"), array("q", [0])
        self._stats = DatasetStats.total([])

    def take(self, chunk: RowChunk) -> "Gathered":
        """Add a chunk behind the others."""
        self._ids.frombytes(chunk.input_ids.tobytes())
        self._weights.frombytes(chunk.weights.tobytes())
        self._offsets.frombytes((self._offsets[-1] + np.cumsum(chunk.lengths)).tobytes())
        self._stats = DatasetStats.total([self._stats, chunk.stats])
        return self

    def rows(self) -> TokenizedRows:
        """What was gathered; the memory is handed over, not copied."""
        return TokenizedRows(
            input_ids=np.asarray(self._ids),
            weights=np.asarray(self._weights),
            offsets=np.asarray(self._offsets),
            stats=self._stats,
        )


class GatheredFiles:
    """Rows gathered in files of a folder, one for each array.

    Args:
        folder: an empty one.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, FileIO] = {}
        self._tokens = self._rows = 0
        self.stats = DatasetStats.total([])
        for name in FILES:
            self._files[name] = (folder / name).open("wb", buffering=0)
        self._files["offsets"].write(np.int64(0).tobytes())

    def take(self, chunk: RowChunk) -> None:
        """Add a chunk behind the others.

        Raises:
            OSError: if it does not fit; `recover` then has the rows so far, without it.
        """
        parts: dict[str, npt.NDArray[Any]] = {
            "input_ids": chunk.input_ids,
            "weights": chunk.weights,
            "offsets": self._tokens + np.cumsum(chunk.lengths),
        }
        for name, part in parts.items():
            content = memoryview(part.tobytes())
            while content:  # the last chunk that a disk takes may be taken in part
                content = content[self._files[name].write(content) :]
        self._tokens += len(chunk.input_ids)
        self._rows += len(chunk.lengths)
        self.stats = DatasetStats.total([self.stats, chunk.stats])

    def recover(self) -> RowChunk:
        """The rows so far, in memory."""
        offsets = np.fromfile(self.folder / "offsets", dtype=np.int64, count=self._rows + 1)
        return RowChunk(
            input_ids=np.fromfile(self.folder / "input_ids", np.int32, count=self._tokens),
            weights=np.fromfile(self.folder / "weights", np.float32, count=self._tokens),
            lengths=np.diff(offsets),
            stats=self.stats,
        )

    def finish(self) -> None:
        """Everything is on the disk.

        Raises:
            OSError: if the disk refuses it.
        """
        for file in self._files.values():
            os.fsync(file.fileno())

    def close(self) -> None:
        """Write no more."""
        for file in self._files.values():
            file.close()


def mapped_rows(folder: Path, stats: DatasetStats, *, digest: str) -> TokenizedRows:
    """The rows that `GatheredFiles` left in a folder; pages are read when they are needed.

    Raises:
        OSError: if a file cannot be mapped.
    """
    lengths = {"input_ids": stats.tokens, "weights": stats.tokens, "offsets": stats.rows + 1}
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.asarray(np.memmap(folder / name, dtype=dtype, mode="r", shape=(lengths[name],)))
        for name, dtype in FILES.items()
    }
    return TokenizedRows(**arrays, stats=stats, digest=digest)


def digest_of_files(folder: Path) -> str:
    """What `TokenizedRows.digest` is of them, read in order and not mapped: pages that are mapped
    count as this process's memory.

    Raises:
        OSError: if a file cannot be read.
    """
    found = xxhash.xxh3_128()
    for name in FILES:
        with (folder / name).open("rb", buffering=0) as file:
            while content := file.read(READ_BYTES):
                found.update(content)
    return str(found.hexdigest())
