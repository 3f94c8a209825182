"""One large anonymous mapping for all host state, page-locked once if a GPU reads it.

Anonymous private mapping with huge pages, registered with CUDA at its exact size: no rounding to
powers of two, no second copy, one registration.  On several NUMA nodes pages are dealt out over
them.  Price: the registration touches every page.
"""

import mmap
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megatrain.memory.numa import interleave, usable_nodes

ALIGN_BYTES = 4096

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_notice(setting: Path = HUGE_PAGES) -> str | None:
    """What a user should hear of huge pages; None if they are to be had."""
    if not setting.is_file() or "[never]" not in setting.read_text():
        return None
    return (
        "transparent huge pages are off: page-locking takes longer and updates are slower; turn"
        f" them on with: echo madvise | sudo tee {setting}"
    )


class HostSlab:
    """Hands out aligned pieces of one mapping, in order, and owns it.

    Args:
        nbytes: size, before rounding up to whole pages.
        pin: register with CUDA for fast asynchronous copies.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes = max(-(-nbytes // ALIGN_BYTES), 1) * ALIGN_BYTES
        self._mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._used = 0
        self._unpin: weakref.finalize[[Tensor], HostSlab] | None = None
        placed = interleave(self._bytes.data_ptr(), self.nbytes, usable_nodes())
        notices = (placed, self._register() if pin else None)
        self.notices = tuple(text for text in notices if text is not None)
        """What a user should hear of NUMA and of page-locking."""

    def _register(self) -> str | None:
        """What a user should hear of it; None if there is nothing to say."""
        self._bytes.zero_()  # torch's threads touch the pages faster than the driver would
        status = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)
        if int(status) != 0:
            _forget_error()
            return (
                f"the driver refused to page-lock {self.nbytes / 2**30:.1f} GiB of host memory"
                f" (cudaHostRegister returned {int(status)}): every copy to and from the GPU will"
                " be many times slower. Raise the memlock limit (ulimit -l unlimited; of a"
                " container: --ulimit memlock=-1), give WSL more memory, or use a smaller model"
            )
        # Also when nobody calls close(): a mapping that goes away while it is registered makes
        # the next registration of its addresses fail.
        self._unpin = weakref.finalize(self, _unregister, self._bytes)
        return None

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` bytes (uint8), zero-filled, aligned to a page."""
        start = self._used
        self._used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        assert self._used <= self.nbytes, "slab is too small: sizes were computed wrongly"
        return self._bytes[start : start + nbytes]

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes that `take(nbytes)` uses up."""
        return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

    def close(self) -> None:
        """Undo the registration; the memory goes when the last tensor over it goes."""
        if self._unpin is not None:
            self._unpin()


def _forget_error() -> None:
    """A refusal stays behind as CUDA's last error, which the next kernel would be blamed for."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unregister(pinned: Tensor) -> None:
    torch.cuda.synchronize()  # no copy may be under way
    torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())
