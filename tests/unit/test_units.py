"""Sizes are read as written and printed in the largest unit."""

import pytest

from megatrain.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24000MB", 24 * 10**9),
        ("5GB", 5 * 10**9),
        (" 1.5 kib ", 1536),
        ("2TiB", 2**41),
        ("7", 7),
        (7, 7),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["much", "", "-1GiB", "1 XB", "GiB", "1e9", "nan", "1,5GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (1023, "1023 B"),
        (2048, "2.00 KiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**40, "1.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_unit(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text
