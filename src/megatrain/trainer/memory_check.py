"""Whether a run that is under way takes what its plan says.

On the CPU there is nothing to compare: activations are not planned there.
"""

from collections.abc import Mapping

from megatrain.placing import RunPlan
from megatrain.units import format_bytes

WARM_STEPS = 3
"""After so many everything is compiled and in its place."""
SHARE, LEAST = 0.05, 2 * 2**30
"""More than both beyond the plan is told: what data and libraries take differs by less."""
GIB = 2**30


def planned_memory(plan: RunPlan) -> dict[str, int]:
    """Bytes by the names that `engine.meter.memory_in_use` has; empty on the CPU."""
    if plan.placement is None:
        return {}
    return {
        "host_memory_gib": plan.need.host_total,
        "gpu_memory_gib": plan.placement.device_bytes,
    }


def beyond_plan(planned: Mapping[str, int], used: Mapping[str, float]) -> list[str]:
    """One line for each memory of which the process holds clearly more than was planned.

    Args:
        planned: bytes by name.
        used: GiB by name.
    """
    said = []
    for name, nbytes in planned.items():
        held = int(used[name] * GIB)
        if held - nbytes > max(SHARE * nbytes, LEAST):
            key = name.removesuffix("_gib")
            said.append(
                f"{key}: the process holds {format_bytes(held)}, and the plan has"
                f" {format_bytes(nbytes)}; if other processes need that room, set {key} lower by"
                f" {format_bytes(held - nbytes)}"
            )
    return said
