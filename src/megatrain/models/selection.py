"""Which parameters are trained.

A pattern is one of

- a glob over full parameter names: `*.mlp.experts.*`, `*norm*`, `model.layers.3.*`;
- `layers[-4:]`, `layers[0]`, `layers[2:6]`: decoder layers, as Python slices a list;
- `embed` or `head`: what lies before the first layer, and behind the last.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatrain.errors import UserError

LAYERS = re.compile(r"layers\[(-?\d*)(:?)(-?\d*)\]")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Patterns of what is trained; `frozen` is taken away from `trainable`."""

    trainable: Sequence[str] = ()
    """None at all: everything."""
    frozen: Sequence[str] = ()
    evaluation: bool = False
    """Nothing is trained: the model is only evaluated."""

    def names(self, blocks: Mapping[str, Sequence[str]]) -> set[str]:
        """The full names of the parameters that are trained.

        Args:
            blocks: parameter names by block name, which is embed, layers.0 ..., or head.

        Raises:
            UserError: if a pattern matches nothing, or nothing is left to train.
        """
        if self.evaluation:
            return set()
        everything = {name for names in blocks.values() for name in names}
        chosen = _union("trainable", self.trainable, blocks) if self.trainable else everything
        chosen -= _union("frozen", self.frozen, blocks)
        if not chosen:
            raise UserError(
                asked=f"trainable: {list(self.trainable)}, frozen: {list(self.frozen)}",
                found="no parameter left to train",
                change="freeze less",
            )
        return chosen


def _union(key: str, patterns: Iterable[str], blocks: Mapping[str, Sequence[str]]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matches = set(_matches(pattern, blocks))
        if not matches:
            example = next(name for names in blocks.values() for name in names)
            raise UserError(
                asked=f"{key} pattern '{pattern}'",
                found="no parameter of that name",
                change=f"use a glob over names such as '{example}', layers[-4:], embed or head",
            )
        found |= matches
    return found


def _matches(pattern: str, blocks: Mapping[str, Sequence[str]]) -> Iterable[str]:
    if pattern in ("embed", "head"):
        return blocks[pattern]
    layers = [names for block, names in blocks.items() if block.startswith("layers.")]
    if match := LAYERS.fullmatch(pattern):
        first, colon, last = match.groups()
        start = int(first) if first else None
        if colon:
            wanted = layers[start : int(last) if last else None]
        elif start is None or last:
            wanted = []
        else:
            wanted = layers[start:][:1] if -len(layers) <= start < len(layers) else []
        return (name for names in wanted for name in names)
    every = (name for names in blocks.values() for name in names)
    return (name for name in every if fnmatchcase(name, pattern))
