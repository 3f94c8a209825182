"""Where bytes live: slabs of host memory and the blocks' flat buffers in them."""

from megatrain.memory.slab import HostSlab
from megatrain.memory.store import BlockStore, segment_views

__all__ = ["BlockStore", "HostSlab", "segment_views"]
