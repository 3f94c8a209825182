"""What a run will need, before anything is allocated."""

from megatrain.planner.fit import MemoryNeed, available_host_bytes, check_fits, memory_need
from megatrain.planner.inference import resident_weights
from megatrain.planner.placement import Placement, PlacementRule

__all__ = [
    "MemoryNeed",
    "Placement",
    "PlacementRule",
    "available_host_bytes",
    "check_fits",
    "memory_need",
    "resident_weights",
]
