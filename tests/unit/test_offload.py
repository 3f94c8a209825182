"""`offload`: what is asked for is so, the rest is chosen, and what cannot be is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megatrain.errors import UserError
from megatrain.planner import NOTHING_ASKED, Offload, read_offload

from .test_placement import HEAD, LAYERS, PLAN, rule

NONE: frozenset[int] = frozenset()


def read(asked: dict[str, Any], **options: Any) -> Offload:
    return read_offload(asked, PLAN, **({"has_gpu": True, "has_disk": True} | options))


def test_blocks_are_named_as_in_the_model() -> None:
    every = frozenset(range(1, LAYERS + 1))
    assert read({}) == NOTHING_ASKED
    found = read({"resident": ["embed", "0-2", 5, "head"], "saved": 2, "disk": ["6-7"]})
    assert found.resident == {0, 1, 2, 3, 6, HEAD}
    assert (found.saved, found.spilled, found.disk) == ({1, 2}, None, {7, 8})
    assert read({"resident": "all"}).resident == every | {0, HEAD}
    assert read({"spilled": "all", "disk": 3}).spilled == every
    assert read({"disk": 3}).disk == {6, 7, 8}
    nothing = read({"saved": 0, "disk": []})
    assert (nothing.resident, nothing.saved, nothing.disk) == (None, NONE, NONE)
    assert read({"weight_slots": 3, "disk_slots": 2}).slots == (
        ("layer_weight_slots", 3),
        ("disk_slots", 2),
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"residents": 1}, "unknown residents. use resident, saved"),
        ({"resident": 11}, "'resident' can be 0 to 10 blocks"),
        ({"saved": -1}, "'saved' can be 0 to 8 blocks"),
        ({"saved": ["embed"]}, "embed, not possible for 'saved'. 'saved' takes layer 0 to layer 7"),
        ({"disk": ["head"]}, "head, not possible for 'disk'"),
        ({"resident": ["8"]}, "'8' in 'resident'. layers are 0 to 7"),
        ({"resident": ["3-1"]}, "'3-1' in 'resident'"),
        ({"resident": True}, "True in 'resident'. write all, a count"),
        ({"resident": "some"}, "'some' in 'resident'"),
        ({"resident": None}, "None in 'resident'"),
        ({"resident": [0, "head"], "disk": "all"}, "layer 0 in 'resident' and in 'disk'"),
        ({"saved": [1], "spilled": ["0-1"]}, "layer 1 in 'saved' and in 'spilled'"),
        ({"put_off": 1}, "clipping, with which all updates wait. set max_grad_norm: 0"),
        ({"weight_slots": 0}, "weight_slots: 0. use a whole number from 1"),
        ({"weight_slots": "2"}, "weight_slots: 2"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read(asked)


def test_what_is_put_off_stays_on_the_host() -> None:
    plan = replace(PLAN, clip=False)

    def without_clipping(asked: dict[str, Any]) -> Offload:
        return read_offload(asked, plan, has_gpu=True, has_disk=True)

    assert without_clipping({"put_off": ["embed", "0-1", "head"]}).put_off == {0, 1, 2, HEAD}
    assert without_clipping({"put_off": 2}).put_off == {0, 1}
    for other in ("resident", "disk"):
        with pytest.raises(UserError, match=f"layer 1 in '{other}' and in 'put_off'"):
            without_clipping({"put_off": [1, 2], other: [1]})
    for wanted in (NONE, frozenset({0, 4, HEAD})):
        asked = replace(rule(2**40, clip=False), offload=Offload(put_off=wanted))
        placement = asked.place()
        assert placement.put_off == wanted and not placement.resident & wanted
        assert asked.laid_out(placement).put_off == wanted


def test_entries_that_need_something_else() -> None:
    for name in ("resident", "spilled"):
        with pytest.raises(UserError, match="no GPU"):
            read({name: 1}, has_gpu=False)
    with pytest.raises(UserError, match="set disk_path"):
        read({"disk": 1}, has_disk=False)
    frozen = replace(PLAN, trainable=(False,) * 4 + (True,) * 6)
    lowest = read_offload({"saved": 1}, frozen, has_gpu=True, has_disk=True)
    assert lowest.saved == {4}
    with pytest.raises(UserError, match="layer 0, not possible for 'saved'"):
        read_offload({"saved": [0]}, frozen, has_gpu=True, has_disk=True)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    "asked",
    [
        {"resident": [3, "head"]},
        {"resident": 0},
        {"saved": ["2-4"]},
        {"saved": 0},
        {"spilled": [0, 5]},
        {"spilled": 0},
        {"disk": 4},
        {"resident": ["embed", 1], "saved": [6], "spilled": ["0-5", 7]},
        {"resident": "all", "saved": "all", "spilled": 0},
    ],
    ids=str,
)
def test_the_planner_keeps_to_what_was_asked(asked: dict[str, Any], clip: bool) -> None:
    offload = read(asked)
    free = replace(rule(2**40, clip=clip), offload=offload)
    least = min(
        free.placement(offload.resident or NONE, offload.saved or NONE, spills=spills).device_bytes
        for spills in ((False, True) if offload.spilled is None else (False,))
    )
    with pytest.raises(UserError, match="ask for less in offload"):
        replace(free, budget=least - 1).place()
    for budget in (least, 2 * least, 2**40):
        found = replace(free, budget=budget).place()
        assert found.device_bytes <= budget
        if offload.resident is not None:
            assert found.resident == offload.resident
        if offload.saved is not None:
            assert found.saved == offload.saved
        spilled = NONE if found.spill is None else found.spill.blocks
        if offload.spilled is not None:
            assert spilled == offload.spilled
        assert not found.resident & (offload.disk or NONE)
        assert not found.saved & spilled
