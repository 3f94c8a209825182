"""What the groups of keys have in common."""

from pydantic import BaseModel, ConfigDict

from megatrain.units import parse_bytes


class Keys(BaseModel):
    """Strict, frozen, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def check_size(value: str | None) -> str | None:
    """A size such as 24GiB that is not zero.

    Raises:
        ValueError: for anything else.
    """
    if value is not None and parse_bytes(value) == 0:
        raise ValueError(f"'{value}' is no room at all")
    return value


def check_count_or_share(value: float) -> float:
    """A whole number, or a share below 1.

    Raises:
        ValueError: for anything else.
    """
    if value > 1 and not value.is_integer():
        raise ValueError("a count is a whole number, a share is below 1")
    return value
