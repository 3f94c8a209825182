"""How a model is told that a row holds several samples, so that none sees another.

transformers builds the masks: where positions restart, a sample begins.  Most models hand their
positions to its mask functions; some do not, and are given the masks ready made.  Which of the two
is right for a model, if any, `packing_proof` finds out on a tiny instance.

Price: a mask of one byte (eager attention: a number in the compute dtype) for each pair of tokens
of a row and each kind of attention, from forward to backward.
"""

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from megatrain.models.build import text_config


class Packing(StrEnum):
    """What is handed to a model beside the tokens."""

    POSITIONS = "positions"
    """Positions that restart; the model has its masks made from them."""
    MASKS = "masks"
    """Those, and the masks that transformers makes from them."""


def packed_inputs(
    packing: Packing, config: Any, positions_BT: Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of a model's forward for packed rows.

    Args:
        packing: what the model needs.
        config: the model's.
        positions_BT: of each token in its sample.
        dtype: of activations.
    """
    inputs: dict[str, Any] = {"position_ids": positions_BT}
    if packing is Packing.MASKS:
        like_embeddings = torch.empty(
            (*positions_BT.shape, 0), dtype=dtype, device=positions_BT.device
        )
        # By position: the cache has one name in transformers 5.17, another in 5.24.
        nothing_masked, nothing_cached = None, None
        inputs["attention_mask"] = create_masks_for_generate(
            text_config(config), like_embeddings, nothing_masked, nothing_cached, positions_BT
        )
    return inputs
