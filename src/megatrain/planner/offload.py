"""What a run was told to put where; `offload` in the config, checked before anything is allocated.

An entry is `all`, a count, or a list of layers (counted from 0, as in the model's weights), ranges
of them such as 0-3, and for `resident` and `put_off` also embed and head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megatrain.errors import UserError
from megatrain.schedule import StepPlan

TIERS = ("resident", "saved", "spilled", "disk", "put_off")
SLOTS = {
    "weight_slots": "layer_weight_slots",
    "gradient_slots": "layer_gradient_slots",
    "waiting_slots": "waiting_gradient_slots",
    "disk_slots": "disk_slots",
}
"""Key: the engine's option."""
NOT_BOTH = (
    ("resident", "disk"),
    ("saved", "spilled"),
    ("resident", "put_off"),
    ("disk", "put_off"),
)
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What was asked for, by block number; None is left to the planner."""

    resident: frozenset[int] | None = None
    """Blocks whose state lives on the device."""
    saved: frozenset[int] | None = None
    """Layers that are not recomputed."""
    spilled: frozenset[int] | None = None
    """Layers whose inputs wait on the host."""
    disk: frozenset[int] | None = None
    """Layers whose state lives on the disk."""
    put_off: frozenset[int] | None = None
    """Blocks whose updates run beside the next forward."""
    slots: tuple[tuple[str, int], ...] = ()
    """(option of the engine, number)."""
    words: str = ""
    """As it was written; empty if nothing was."""

    @property
    def not_resident(self) -> frozenset[int]:
        """Blocks that the planner may not keep on the device."""
        return (self.disk or frozenset()) | (self.put_off or frozenset())

    @property
    def not_saved(self) -> frozenset[int]:
        """Layers that the planner may not save."""
        return self.spilled or frozenset()


NOTHING_ASKED = Offload()


def read_offload(
    asked: Mapping[str, Any], plan: StepPlan, *, has_gpu: bool, has_disk: bool
) -> Offload:
    """What the entries mean for a model.

    Args:
        asked: the key of the config.
        plan: of the model, before anything is placed.
        has_gpu: without, state and inputs are in one memory.
        has_disk: there is a directory for state.

    Raises:
        UserError: for what does not exist, or contradicts itself.
    """
    if not asked:
        return NOTHING_ASKED
    if unknown := sorted(set(asked) - {*TIERS, *SLOTS}):
        _refuse(asked, f"unknown {', '.join(unknown)}", f"use {', '.join((*TIERS, *SLOTS))}")
    for name in ("resident", "spilled"):
        if name in asked and not has_gpu:
            _refuse(asked, f"no GPU that '{name}' could be about", f"leave '{name}' out")
    if "disk" in asked and not has_disk:
        _refuse(asked, "no directory for 'disk'", "set disk_path in the config of a run")
    if asked.get("put_off") and plan.clip:
        _refuse(asked, "clipping, with which all updates wait", "set max_grad_norm: 0")
    trained = range(max(plan.lowest_trainable, 1), plan.num_layers + 1)
    layers, blocks = range(1, plan.num_layers + 1), range(plan.head + 1)
    allowed = {"resident": blocks, "saved": trained, "spilled": trained, "put_off": blocks}
    tiers = {
        name: _blocks(asked, name, allowed.get(name, layers), plan)
        for name in TIERS
        if name in asked
    }
    for one, other in NOT_BOTH:
        if both := tiers.get(one, frozenset()) & tiers.get(other, frozenset()):
            named = ", ".join(_name(block, plan) for block in sorted(both))
            _refuse(asked, f"{named} in '{one}' and in '{other}'", "name each in one of them")
    slots = [(SLOTS[name], _count(asked, name)) for name in SLOTS if name in asked]
    words = ", ".join(f"{name}: {value}" for name, value in asked.items())
    return Offload(**tiers, slots=tuple(slots), words=words)


def _blocks(asked: Mapping[str, Any], name: str, allowed: range, plan: StepPlan) -> frozenset[int]:
    """A count is of the first of them, of the last for the disk: as the planner chooses."""
    value = asked[name]
    if value == "all":
        return frozenset(allowed)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= len(allowed):
            _refuse(asked, f"'{name}' can be 0 to {len(allowed)} blocks", "ask for so many")
        return frozenset(allowed[len(allowed) - value :] if name == "disk" else allowed[:value])
    blocks: set[int] = set()
    for part in value if isinstance(value, list) else [value]:
        blocks.update(_part(asked, name, part, plan))
    if outside := sorted(blocks - set(allowed)):
        _refuse(
            asked,
            f"{', '.join(_name(block, plan) for block in outside)}, not possible for '{name}'",
            f"'{name}' takes {_name(allowed[0], plan)} to {_name(allowed[-1], plan)}"
            if allowed
            else f"leave '{name}' out: no layer is trained",
        )
    return frozenset(blocks)


def _part(asked: Mapping[str, Any], name: str, part: Any, plan: StepPlan) -> range:
    ends = {"embed": 0, "head": plan.head}
    if part in ends:
        return range(ends[part], ends[part] + 1)
    match = None if isinstance(part, bool) else RANGE.fullmatch(str(part))
    if match is None:
        _refuse(
            asked,
            f"{part!r} in '{name}'",
            "write all, a count, or a list of layers such as [embed, 0-3, 7]",
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < plan.num_layers:
        _refuse(asked, f"'{part}' in '{name}'", f"layers are 0 to {plan.num_layers - 1}")
    return range(first + 1, last + 2)


def _count(asked: Mapping[str, Any], name: str) -> int:
    value = asked[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(asked, f"{name}: {value}", "use a whole number from 1")
    return int(value)


def _name(block: int, plan: StepPlan) -> str:
    return {0: "embed", plan.head: "head"}.get(block, f"layer {block - 1}")


def _refuse(asked: Mapping[str, Any], found: str, change: str) -> NoReturn:
    raise UserError(asked=f"offload: {dict(asked)}", found=found, change=change)
