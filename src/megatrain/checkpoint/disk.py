"""Files that survive a power cut: what is closed here is on the disk and known by its digest.

Everything that a checkpoint writes, renames or removes goes through `Disk`, so that a test can
record the order, fill the disk or fail an operation.
"""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

SYNC_BYTES = 2**27
"""Written bytes of a file after which they are sent to the disk, while the next are written: twice
as many are in memory at most, and they must not pile up there."""
READ_BYTES = 2**24
"""Read at a time for a digest."""

_SENDERS = ThreadPoolExecutor(2, thread_name_prefix="megatrain-disk")
"""A checkpoint has a file of weights and one of state in writing.  Threads begin with the first."""

Data = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file holds."""

    nbytes: int
    digest: str
    """xxh3_128, hexadecimal."""


class DiskFile:
    """A file that is written once, from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._hash = xxhash.xxh3_128()
        self._nbytes = self._sent = 0
        self._sending: Future[None] | None = None

    def write(self, data: Data) -> None:
        """Append; what is written may still be in memory."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        while view:
            written = self._file.write(view)
            self._nbytes += written
            view = view[written:]
        if self._nbytes - self._sent >= SYNC_BYTES:
            self._finish_sending()
            self._sending = _SENDERS.submit(_send, self._file.fileno(), self._nbytes)
            self._sent = self._nbytes

    def close(self) -> FileRecord:
        """All of it is on the disk when this returns."""
        try:
            self._finish_sending()
            os.fsync(self._file.fileno())
        finally:
            self.abandon()
        return FileRecord(nbytes=self._nbytes, digest=self._hash.hexdigest())

    def abandon(self) -> None:
        """Close without a promise, if it is not closed."""
        with suppress(OSError):
            self._finish_sending()  # its number may be another file's once it is closed
        self._file.close()

    def _finish_sending(self) -> None:
        """Wait for the thread; a failure that it met is raised by every call from then on: the
        system tells it once, and a later `fsync` would succeed.
        """
        if self._sending is not None:
            self._sending.result()
            self._sending = None


def _send(file: int, nbytes: int) -> None:
    """What is written of a file goes to the disk."""
    os.fdatasync(file)
    # Written pages would push out what the page cache is good for.
    os.posix_fadvise(file, 0, nbytes, os.POSIX_FADV_DONTNEED)


class Disk:
    """The operations of a file system that checkpoints need."""

    def create(self, path: Path) -> DiskFile:
        """A new file; it must not exist."""
        return DiskFile(path)

    def write(self, path: Path, data: bytes) -> FileRecord:
        """A whole small file."""
        file = self.create(path)
        try:
            file.write(data)
            return file.close()
        finally:
            file.abandon()

    def adopt(self, path: Path) -> FileRecord:
        """Take in a file that a library wrote: it is on the disk when this returns."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return record_of(path)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; survives a power cut once the directory of `target` is synced."""
        source.replace(target)

    def sync_directory(self, path: Path) -> None:
        """Names in this directory are on the disk when this returns."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directories(self, path: Path) -> None:
        """The same of all that are below it; a tokenizer's files may have one of their own."""
        for below in path.rglob("*"):
            if below.is_dir():
                self.sync_directory(below)
        self.sync_directory(path)

    def remove(self, path: Path) -> None:
        """A file or a whole directory; no error if it is gone."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=False)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """What this user may still write below `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def record_of(path: Path) -> FileRecord:
    """Size and digest of a file as it is read back."""
    found, nbytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(buffer[:count])
            nbytes += count
    return FileRecord(nbytes=nbytes, digest=found.hexdigest())
