"""Where bytes live: slabs of host memory, scratch space on a disk, the blocks' flat buffers."""

from megatrain.memory.disk import DiskBlocks, DiskTier
from megatrain.memory.slab import HostSlab
from megatrain.memory.store import BlockStore, segment_views

__all__ = ["BlockStore", "DiskBlocks", "DiskTier", "HostSlab", "segment_views"]
