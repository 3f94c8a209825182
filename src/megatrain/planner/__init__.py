"""What a run will need, before anything is allocated."""

from megatrain.planner.fit import MemoryNeed, available_host_bytes, check_fits, memory_need

__all__ = ["MemoryNeed", "available_host_bytes", "check_fits", "memory_need"]
