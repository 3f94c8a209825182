"""One training row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Row:
    """T tokens and how much each counts as a target."""

    input_ids: npt.NDArray[np.int64]
    """(T,)"""
    weights: npt.NDArray[np.float32]
    """(T,) loss weight of token t *as a target*; 0 is not supervised.  The first token is never
    a target, whatever its weight."""
