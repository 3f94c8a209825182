"""Mistakes in a config, in words."""

import difflib
import re
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from megatrain.config.foreign import SYNONYMS
from megatrain.errors import UserError


def as_user_error(error: ValidationError, keys: Collection[str]) -> UserError:
    """All that pydantic found, one part for each.

    Args:
        error: pydantic's.
        keys: that there are.
    """
    return UserError(
        asked="this config",
        found="; ".join(_describe(item, keys) for item in error.errors()),
        change="see docs/config.md",
    )


def nearest_key(key: str, keys: Collection[str]) -> str | None:
    """The key that is probably meant; another trainer's name counts as a key."""
    near = difflib.get_close_matches(key, [*keys, *SYNONYMS], n=1)
    return near[0] if near else None


def _describe(item: Any, keys: Collection[str]) -> str:
    """One mistake in few words."""
    message = item["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, item["loc"]))
    if not where:
        return str(message)
    if item["type"] == "extra_forbidden":
        near = where if where in SYNONYMS else nearest_key(where, keys)
        near = SYNONYMS.get(near or "", near)  # in Python keys have one name only
        return f"{where}: no such key" + (f" (did you mean '{near}')" if near else "")
    message = message[0].lower() + message[1:]
    found = "" if item["type"] == "missing" else f" (found {item['input']!r}{_meant(item)})"
    return f"{where}: {message}{found}"


def _meant(item: Any) -> str:
    """Of the values that a key takes, the one that is probably meant."""
    if item["type"] != "literal_error" or not isinstance(item["input"], str):
        return ""
    choices = re.findall(r"'([^']+)'", item["ctx"]["expected"])
    near = difflib.get_close_matches(item["input"].lower(), choices, n=1)
    return f": did you mean '{near[0]}'" if near else ""
