"""The layout packs every parameter exactly once, aligned, for every purpose."""

import pickle
from dataclasses import replace

import pytest

from megatrain.layout import ALIGN_ELEMENTS, BlockLayout, ParamSpec, Purpose


def spec(name: str, *shape: int, dtype: str = "bfloat16", **flags: bool) -> ParamSpec:
    chosen = {"trainable": True, "decayed": True} | flags
    return ParamSpec(name=name, shape=shape, dtype=dtype, **chosen)


LAYOUT = BlockLayout.build(
    [
        spec("a", 3, 5),
        spec("norm", 7, decayed=False),
        spec("b", 1),
        spec("gate", 4, 4, dtype="float32"),
        spec("frozen", 130, trainable=False),
    ]
)


def test_parameters_of_one_kind_share_a_segment() -> None:
    names = [[param.name for param in segment.params] for segment in LAYOUT.segments]
    assert names == [["a", "b"], ["norm"], ["gate"], ["frozen"]]
    assert LAYOUT.num_params == 15 + 7 + 1 + 16 + 130


def test_parameters_are_aligned_and_do_not_overlap() -> None:
    for segment in LAYOUT.segments:
        end = 0
        for param in segment.params:
            assert param.offset % ALIGN_ELEMENTS == 0 and param.offset >= end
            end = param.offset + param.numel
        assert end <= segment.numel and segment.numel % ALIGN_ELEMENTS == 0


@pytest.mark.parametrize(
    ("purpose", "expected"),
    [
        (Purpose.WEIGHT, 256 * 2 + 128 * 2 + 128 * 4 + 256 * 2),
        (Purpose.RESIDUAL, 256 * 2 + 128 * 2),
        (Purpose.EXP_AVG, (256 + 128 + 128) * 4),
        (Purpose.GRADIENT, (256 + 128 + 128) * 2),
        (Purpose.ACCUMULATOR, (256 + 128 + 128) * 4),
    ],
)
def test_bytes_by_purpose(purpose: Purpose, expected: int) -> None:
    assert LAYOUT.nbytes(purpose, "bfloat16") == expected


def test_a_layout_that_has_counted_its_bytes_is_the_same_layout() -> None:
    asked, fresh = replace(LAYOUT), replace(LAYOUT)
    for dtype in ("bfloat16", "float32"):
        regions = fresh.regions(Purpose.GRADIENT, dtype)
        nbytes = sum(region.numel * (2 if dtype == "bfloat16" else 4) for region in regions)
        assert asked.nbytes(Purpose.GRADIENT, dtype) == nbytes  # each by its own dtype
        assert asked.nbytes(Purpose.GRADIENT, dtype) == nbytes
    assert (asked, hash(asked), repr(asked)) == (fresh, hash(fresh), repr(fresh))
    assert pickle.loads(pickle.dumps(asked)) == fresh
    shorter = replace(asked, segments=asked.segments[:1])  # what was counted is not its own
    assert shorter.nbytes(Purpose.WEIGHT) < asked.nbytes(Purpose.WEIGHT)


def test_regions_follow_one_another() -> None:
    regions = LAYOUT.regions(Purpose.WEIGHT)
    assert [region.byte_offset for region in regions] == [0, 512, 768, 1280]


def test_a_name_stands_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        BlockLayout.build([spec("a", 2), spec("a", 2)])
