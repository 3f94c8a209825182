"""Sizes are read as written and printed in the largest unit."""

import pytest

from megatrain.units import UNITS, format_bytes, format_enough, parse_bytes


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


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_every_unit_is_exact(power: int) -> None:
    """Of an SI prefix with B: powers of 1000; with iB, or the letter alone: of 1024."""
    letter = "KMGT"[power - 1]
    assert parse_bytes(f"24{letter}B") == 24 * 1000**power
    for unit in (letter, f"{letter}iB"):
        assert parse_bytes(f"24{unit}") == parse_bytes(f"24 {unit.lower()}") == 24 * 1024**power


def test_there_is_no_other_unit() -> None:
    assert set(UNITS) == {"", "B"} | {f"{x}{end}" for x in "KMGT" for end in ("", "B", "IB")}


def test_large_sizes_are_exact() -> None:
    assert parse_bytes("9007199254740993") == 2**53 + 1  # no float has it
    assert parse_bytes("0.1GB") == 10**8
    assert parse_bytes("1.1TB") == 1_100_000_000_000


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


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (3 * 2**30, "3.00 GiB"),
        (3 * 2**30 + 1, "3.01 GiB"),
        (2**40 - 1, "1024.00 GiB"),
        (2**40 + 1, "1.01 TiB"),
    ],
)
def test_a_size_that_is_to_be_given_is_rounded_up(nbytes: int, text: str) -> None:
    assert format_enough(nbytes) == text
    assert parse_bytes(text) >= nbytes
