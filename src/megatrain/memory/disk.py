"""State of blocks that live on the disk: one piece of a scratch file each.

Promise: what is not asked for is neither read nor written; a failing disk is one clear error.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatrain.errors import UserError
from megatrain.layout import BlockLayout, Purpose
from megatrain.memory.scratch import Extent, ScratchFile
from megatrain.memory.slab import HostSlab


@dataclass(frozen=True, kw_only=True)
class DiskTier:
    """Which blocks live on the disk, and where that is."""

    blocks: frozenset[int]
    path: Path
    """An existing directory."""
    gradient_dtype: str | None = None
    """Of gradients that wait there; None without clipping."""

    def nbytes(self, layouts: Sequence[BlockLayout]) -> int:
        """Of scratch space.

        Args:
            layouts: of all blocks.
        """
        return sum(layouts[block].nbytes_on_disk(self.gradient_dtype) for block in self.blocks)


class DiskBlocks:
    """Reads and writes them.

    Args:
        layouts: of all blocks.
        tier: which of them are here.

    Raises:
        UserError: if there is no room for them.
    """

    def __init__(self, layouts: Sequence[BlockLayout], tier: DiskTier) -> None:
        self.file = ScratchFile(tier.path, tier.nbytes(layouts))
        self._parts = {
            block: layouts[block].on_disk(tier.gradient_dtype) for block in sorted(tier.blocks)
        }
        self._sizes = {
            block: layouts[block].nbytes_on_disk(tier.gradient_dtype) for block in self._parts
        }
        self._offsets: dict[int, int] = {}
        offset = 0
        for block, nbytes in self._sizes.items():
            self._offsets[block] = offset
            offset += nbytes

    def memory(self, block: int) -> Tensor:
        """Room for one block; what nothing is read into takes no memory."""
        return HostSlab(self._sizes[block], pin=False).take(self._sizes[block])

    def parts(self, block: int, memory: Tensor) -> dict[Purpose, Tensor]:
        """Byte buffers (uint8) by purpose in memory that a block is read into."""
        return {
            purpose: memory[part.offset : part.offset + part.nbytes]
            for purpose, part in self._parts[block].items()
        }

    def read(self, block: int, memory: Tensor, purposes: Collection[Purpose]) -> None:
        """From the disk to where `parts` finds them.

        Raises:
            UserError: if the disk fails.
        """
        self._move("read", self.file.read, block, self._extents(block, memory, purposes))

    def write(self, block: int, memory: Tensor, purposes: Collection[Purpose]) -> None:
        """The other way."""
        self._move("write", self.file.write, block, self._extents(block, memory, purposes))

    def write_gradient(self, block: int, memory: Tensor) -> None:
        """From a buffer of its own, which is whole pages long."""
        part = self._parts[block][Purpose.GRADIENT]
        extent = (self._offsets[block] + part.offset, memory[: part.moved])
        self._move("write", self.file.write, block, [extent])

    def _extents(self, block: int, memory: Tensor, purposes: Collection[Purpose]) -> list[Extent]:
        """Neighbours are moved as one."""
        found: list[Extent] = []
        for purpose, part in self._parts[block].items():
            if purpose not in purposes or not part.moved:
                continue
            start = part.offset
            if found and found[-1][0] + found[-1][1].numel() == self._offsets[block] + start:
                start -= found.pop()[1].numel()
            found.append((self._offsets[block] + start, memory[start : part.end]))
        return found

    def _move(
        self,
        what: str,
        call: Callable[[Sequence[Extent]], None],
        block: int,
        extents: Sequence[Extent],
    ) -> None:
        try:
            call(extents)
        except OSError as error:
            raise UserError(
                asked=f"{what} the state of block {block} in scratch space in {self.file.folder}",
                found=error.strerror or str(error),
                change="look after that disk or choose another disk_path, then go on from the last"
                " checkpoint (resume_from_checkpoint: auto)",
            ) from error

    def close(self) -> None:
        """Give the room back."""
        self.file.close()
