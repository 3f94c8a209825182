"""Sizes and their units."""

import math
import re
from fractions import Fraction

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """Bytes of "24GiB", "24G" (the same), "24000MB" or a plain number, exact and rounded down.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"'{text}' is not a size such as 24GiB or 24000MB")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])


def format_bytes(nbytes: float) -> str:
    """A size in the largest binary unit that keeps it at 1 or more."""
    size, unit = _largest_unit(nbytes)
    return f"{nbytes / size:.2f} {unit}" if size > 1 else f"{nbytes:.0f} B"


def format_enough(nbytes: int) -> str:
    """The same, rounded up: whoever types what is printed has room for `nbytes`."""
    size, unit = _largest_unit(nbytes)
    hundredths = math.ceil(Fraction(100 * nbytes, size))
    return f"{hundredths // 100}.{hundredths % 100:02d} {unit}" if size > 1 else f"{nbytes} B"


def _largest_unit(nbytes: float) -> tuple[int, str]:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return size, unit
    return 1, "B"
