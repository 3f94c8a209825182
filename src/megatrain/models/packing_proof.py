"""Proof on a tiny instance that a model keeps the samples of a packed row apart.

transformers masks what it knows of; recurrent layers, convolutions and models with masks of their
own look across the border of two samples without a word.  So nothing is taken for granted: a row
of two samples must give the logits and gradients of the two alone, and the second must not depend
on the first at all.  Price: a second or two at load, for `packing: true` only.
"""

from typing import Any

import torch
from torch import Tensor

from megatrain.errors import UserError
from megatrain.models.packing import Packing, packed_inputs
from megatrain.models.proof import (
    NO_LABEL,
    TOLERANCE,
    blocks_of,
    first_difference,
    small_instance,
)

NARROW = {"sliding_window": 4, "attention_chunk_size": 4}
"""What a token sees is made shorter than a sample, so that this is tried across the border too.
A sparse attention's `index_topk` is left: where scores are equal, its choice is arbitrary."""
FIRST, SECOND = torch.arange(3, 12), torch.arange(14, 21)
OTHER_FIRST = torch.arange(30, 39)
NOT_TAKEN = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
)
"""What transformers' own code raises for positions or masks that a model does not expect."""


def prove_packing(config: Any) -> Packing:
    """How a model must be told of the samples in a row, so that they are kept apart.

    Args:
        config: a transformers config.

    Raises:
        UserError: if it keeps them apart in no way.
    """
    small, model, expected = small_instance(config, [FIRST[None], SECOND[None]], NARROW)
    reasons = []
    for packing in Packing:
        try:
            reason = _why_not(small, model, packing, expected)
        except NOT_TAKEN as error:
            message = " ".join(str(error).split())[:200]
            reason = f"its forward does not take packed rows ({type(error).__name__}: {message})"
        if not reason:
            return packing
        reasons.append(reason)
    raise UserError(
        asked=f"packing: true with model type '{config.model_type}'",
        found=reasons[0],
        change="set packing: false",
    )


def _why_not(config: Any, model: Any, packing: Packing, expected: dict[str, Tensor]) -> str:
    """Why the model must not be told in this way; empty if it may."""
    border = len(FIRST)
    ids_1T = torch.cat([FIRST, SECOND])[None]
    positions_1T = torch.cat([torch.arange(border), torch.arange(len(SECOND))])[None]
    inputs = packed_inputs(packing, config, positions_1T, torch.float32) | {"use_cache": False}
    embedded, packed_TV = _embedded_and_logits(model, ids_1T, inputs)
    with torch.no_grad():
        alone_TV = torch.cat(
            [model(input_ids=each[None], use_cache=False).logits[0] for each in (FIRST, SECOND)]
        )
        changed_1T = torch.cat([OTHER_FIRST, SECOND])[None]
        changed_TV = model(input_ids=changed_1T, **inputs).logits[0]
    if not _close(packed_TV, alone_TV):
        return "logits of packed samples that are not those of the samples alone"
    # Experts are given all tokens at once: their sums may be taken in another order.
    if not _close(packed_TV[border:], changed_TV[border:]):
        return "logits of a sample that change with the sample before it"
    dependence = torch.autograd.grad(packed_TV[border:].square().sum(), embedded, allow_unused=True)
    if any(each is not None and each[:, :border].any() for each in dependence):
        return "logits of a sample that depend on the sample before it"
    none = torch.tensor([NO_LABEL])
    labels_1T = torch.cat([FIRST[1:], none, SECOND[1:], none])
    blocks = blocks_of(config, model)
    blocks.packing = packing
    first = first_difference(blocks, model, expected, ids_1T, labels_1T[None], positions_1T)
    return first and f"gradients of packed rows that differ, block by block (first: {first})"


def _embedded_and_logits(
    model: Any, ids_1T: Tensor, inputs: dict[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """What the tokens' embedding gave, and logits (T, V) computed from it."""
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: embedded.append(output)
    )
    try:
        return embedded, model(input_ids=ids_1T, **inputs).logits[0]
    finally:
        hook.remove()


def _close(some: Tensor, others: Tensor) -> bool:
    return bool((some - others).abs().max() <= TOLERANCE * others.abs().max())
