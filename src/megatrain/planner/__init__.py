"""What a run will need, before anything is allocated."""

from megatrain.planner.disk import (
    DiskUse,
    blocks_on_disk,
    check_disk,
    disk_use,
    tier_for,
    with_disk,
)
from megatrain.planner.fit import MemoryNeed, by_purpose, check_fits, memory_need
from megatrain.planner.host import HostMemory, available_host_bytes, host_memory, more_than_there_is
from megatrain.planner.inference import resident_weights
from megatrain.planner.offload import NOTHING_ASKED, Offload, read_offload
from megatrain.planner.placement import Placement, PlacementRule

__all__ = [
    "NOTHING_ASKED",
    "DiskUse",
    "HostMemory",
    "MemoryNeed",
    "Offload",
    "Placement",
    "PlacementRule",
    "available_host_bytes",
    "blocks_on_disk",
    "by_purpose",
    "check_disk",
    "check_fits",
    "disk_use",
    "host_memory",
    "memory_need",
    "more_than_there_is",
    "read_offload",
    "resident_weights",
    "tier_for",
    "with_disk",
]
