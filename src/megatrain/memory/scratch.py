"""A file without a name that holds bytes for as long as the process lives.

Its room is reserved when it is made, so a disk that is too small is found before the first step.
Reads and writes go past the page cache (O_DIRECT) in pieces, several at once; reads do not queue
behind writes.  Price: offsets and lengths are whole pages, and memory begins at a page.
"""

import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from torch import Tensor

from megatrain.errors import UserError
from megatrain.layout import DISK_ALIGN_BYTES
from megatrain.memory.slab import HostSlab
from megatrain.units import format_bytes

PIECE_BYTES = 4 * 2**20
IN_FLIGHT = 4
"""Requests at once, each way."""
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")

Extent = tuple[int, Tensor]
"""Where in the file, and the memory (uint8) that it is read into or written from."""


class ScratchFile:
    """Room on a disk, nobody else's and gone with the process, however that ends.

    Args:
        folder: an existing directory.
        nbytes: reserved at once.

    Raises:
        UserError: if there is no such room, or no way to write there.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.bytes_read = self.bytes_written = 0
        """Since it was made."""
        try:
            self._file = _open_without_name(folder, nbytes)
        except OSError as error:
            raise UserError(
                asked=f"disk_path: {folder} with {format_bytes(nbytes)} of scratch space",
                found=error.strerror or str(error),
                change="make room, or choose another disk_path",
            ) from error
        self._close = weakref.finalize(self, os.close, self._file)
        self.notice = self._go_direct()
        """What a user should hear of the file system; None if there is nothing to say."""
        self._counting = threading.Lock()
        self._readers, self._writers = (
            ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix=f"megatrain-disk-{what}")
            for what in ("read", "write")
        )

    def _go_direct(self) -> str | None:
        """Switch to direct I/O, unless the file system has none."""
        kind = _file_system(os.fstat(self._file).st_dev)
        if kind in MEMORY_FILE_SYSTEMS:
            return (
                f"disk_path {self.folder} is on {kind}: that is memory, not a disk, and what is"
                " there takes it from the run"
            )
        plain = fcntl.fcntl(self._file, fcntl.F_GETFL)
        page = HostSlab(DISK_ALIGN_BYTES, pin=False).take(DISK_ALIGN_BYTES)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, plain | os.O_DIRECT)
            os.pwritev(self._file, [page.numpy().data], 0)  # of zeros, as everything is here
        except OSError:
            fcntl.fcntl(self._file, fcntl.F_SETFL, plain)
            return (
                f"the file system of disk_path {self.folder} has no direct I/O: what is written"
                " there passes through the page cache, which is slower and takes memory from others"
            )
        return None

    def read(self, extents: Sequence[Extent]) -> None:
        """Fill memory from the file.

        Raises:
            OSError: if the disk fails.
        """
        self._move(self._readers, os.preadv, extents)
        self._count(read=sum(memory.numel() for _, memory in extents))

    def write(self, extents: Sequence[Extent]) -> None:
        """Write memory to the file.

        Raises:
            OSError: if the disk fails.
        """
        self._move(self._writers, os.pwritev, extents)
        self._count(written=sum(memory.numel() for _, memory in extents))

    def _move(
        self,
        pool: ThreadPoolExecutor,
        call: Callable[[int, list[memoryview], int], int],
        extents: Sequence[Extent],
    ) -> None:
        """Returns when nothing is in flight any more, also after a failure."""

        def piece(offset: int, memory: memoryview) -> None:
            while memory:
                done = call(self._file, [memory], offset)
                if not done:
                    raise OSError("the scratch file ends too early")
                offset, memory = offset + done, memory[done:]

        pieces: list[Future[None]] = []
        for offset, tensor in extents:
            memory = tensor.numpy().data
            pieces += [
                pool.submit(piece, offset + start, memory[start : start + PIECE_BYTES])
                for start in range(0, len(memory), PIECE_BYTES)
            ]
        wait(pieces)
        for each in pieces:
            each.result()

    def _count(self, *, read: int = 0, written: int = 0) -> None:
        with self._counting:
            self.bytes_read += read
            self.bytes_written += written

    def close(self) -> None:
        """Give the room back."""
        self._readers.shutdown()
        self._writers.shutdown()
        self._close()


def _open_without_name(folder: Path, nbytes: int) -> int:
    """A descriptor of a file with its room reserved."""
    file, name = tempfile.mkstemp(prefix=".megatrain-", dir=folder)
    try:
        os.unlink(name)
        os.posix_fallocate(file, 0, max(nbytes, DISK_ALIGN_BYTES))
    except OSError:
        os.close(file)
        raise
    return file


def _file_system(device: int) -> str | None:
    """Its name, such as ext4; None if the system does not say."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.is_file() else ():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return None
