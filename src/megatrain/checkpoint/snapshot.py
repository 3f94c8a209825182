"""The state of all blocks at one moment, written while training goes on.

One thread copies blocks, in the order in which training will overwrite them, into a pool of small
buffers; another writes the buffers.  An update of a block that is not copied yet waits (`guard`).
So the pool is the only extra memory, and training loses

    max(0, bytes / disk rate - time until blocks are overwritten - pool / disk rate)

seconds.  Whatever goes wrong, no update waits for ever and no other checkpoint is touched.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from megatrain.checkpoint.contents import Contents, Read
from megatrain.checkpoint.tensors import TensorFiles, data_of
from megatrain.layout import STATE, Purpose
from megatrain.memory import BlockStore, HostSlab
from megatrain.models import BlockModel

LARGEST_BUFFER = 2**25
Part = tuple[str, int, int]
"""A file, and where in a buffer its next bytes are."""


def pool_bytes(
    model: BlockModel, *, asked: int | None = None, saved: Sequence[Purpose] = STATE
) -> int:
    """Of a pool for the checkpoints of a run: never more than holds a whole one.

    Args:
        model: its blocks.
        asked: for; by default the state of two blocks.
        saved: what of each block is in a checkpoint.
    """
    layouts = [block.layout for block in model.blocks]
    if asked is None:
        asked = 2 * max(sum(map(layout.nbytes, STATE)) for layout in layouts)
    whole = sum(layout.nbytes(purpose) for layout in layouts for purpose in saved)
    return min(asked, whole + LARGEST_BUFFER)  # of whole buffers: the last is not filled


class BufferPool:
    """Host memory for what is copied and not written yet.

    Args:
        nbytes: in all; allocated at once.
        pin: page-locked, for what is copied from a GPU.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        size = HostSlab.rounded(max(1, min(LARGEST_BUFFER, nbytes // 8)))
        count = max(2, nbytes // size)
        self.slab = HostSlab(size * count, pin=pin)
        self.nbytes, self.buffer_bytes = size * count, size
        self.free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self.free.put(self.slab.take(size))

    def close(self) -> None:
        """Give back page-locked memory."""
        self.slab.close()


class Snapshot:
    """Copies and writes; made at the moment whose state it is.

    Args:
        contents: what to write, in the order of overwriting.
        weights: of a block.
        store: where its state is; nothing may be pending or on its way.
        files: where the tensors go.
        pool: its buffers.
        complete: run in the writing thread after the last tensor: small files, the name; returns
            a warning, if there is one.
        undo: run there instead if anything failed: what was written takes room.
    """

    def __init__(
        self,
        *,
        contents: Contents,
        weights: Read,
        store: BlockStore,
        files: TensorFiles,
        pool: BufferPool,
        complete: Callable[[], str],
        undo: Callable[[], None],
    ) -> None:
        self._files, self._pool, self._whole_of = files, pool, contents.model.whole_of
        self._pieces = contents.pieces(weights, store)
        self._complete, self._undo = complete, undo
        self._full: queue.SimpleQueue[tuple[Tensor, list[Part]] | None] = queue.SimpleQueue()
        self._buffer, self._used, self._parts = Tensor(), 0, list[Part]()
        self._copied = {block: threading.Event() for block in contents.order}
        self._ended = threading.Event()
        self._began = time.perf_counter()
        self.waited_s = 0.0
        """Until a block was copied that a lane wanted to overwrite; while several wait, once."""
        self._waiting, self._waiting_since = 0, 0.0
        self._lock = threading.Lock()
        self.copied_s = self.seconds = 0.0
        """Until all was copied, and nothing can wait any more; until it had its name."""
        self.error: BaseException | None = None
        """Why it failed, once it has."""
        self.warning = ""
        """What a person should hear of one that has ended well."""
        for work in (self._copy, self._write):
            threading.Thread(target=work, name="megatrain-checkpoint", daemon=True).start()

    def guard(self, block: int) -> None:
        """Return when the block may be overwritten; called from the lane that will."""
        copied = self._copied[self._whole_of(block)]
        if copied.is_set():
            return
        with self._lock:
            if not self._waiting:
                self._waiting_since = time.perf_counter()
            self._waiting += 1
        copied.wait()
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self.waited_s += time.perf_counter() - self._waiting_since

    @property
    def running_s(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def join(self) -> None:
        """Return when it has its name, or has failed (`error`)."""
        self._ended.wait()

    def _copy(self) -> None:
        try:
            self._copy_all()
        except BaseException as error:  # noqa: BLE001  told to whoever waits
            self.error = self.error or error
        finally:
            self.copied_s = self.running_s
            for event in self._copied.values():
                event.set()
            self._full.put(None)

    def _copy_all(self) -> None:
        """Fill one buffer after the other; a block is copied when its last byte is in one."""
        self._buffer, self._used, self._parts = self._pool.free.get(), 0, []
        last: int | None = None
        try:
            for block, (path, data) in self._pieces:
                if last is not None and block != last:
                    self._copied[last].set()
                last = block if block in self._copied else None
                while self.error is None:
                    data = data[self._copy_part(path, data) :]
                    if not data.numel():  # of an empty tensor too: it may be all of its file
                        break
        finally:
            self._full.put((self._buffer, self._parts))

    def _copy_part(self, path: str, data: Tensor) -> int:
        """Bytes that still had room in the buffer."""
        count, used = min(data.numel(), self._pool.buffer_bytes - self._used), self._used
        self._buffer[used : used + count].copy_(data[:count])
        self._parts.append((path, used, used + count))
        self._used += count
        if self._used == self._pool.buffer_bytes:
            self._full.put((self._buffer, self._parts))
            self._buffer, self._used, self._parts = self._pool.free.get(), 0, []
        return count

    def _write(self) -> None:
        try:
            while (item := self._full.get()) is not None:
                buffer, parts = item
                try:
                    for path, start, end in parts if self.error is None else ():
                        self._files.write(path, data_of(buffer[start:end]))
                except BaseException as error:  # noqa: BLE001  told to whoever waits
                    self.error = error
                finally:
                    self._pool.free.put(buffer)
            if self.error is None:
                self.warning = self._complete()
        except BaseException as error:  # noqa: BLE001  told to whoever waits
            self.error = self.error or error
        finally:
            self._files.abandon()
            if self.error is not None:
                self._undo()
            self.seconds = time.perf_counter() - self._began
            self._ended.set()
