"""Which tokens of a text, or of a prompt and its completion, are targets.

Promise: the token ids are those that the tokenizer gives the text in use.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from megatrain.data.rows import Row
from megatrain.data.tokenizer import Tokenizer


def text_row(ids: Sequence[int]) -> Row:
    """Every token supervised."""
    return Row(
        input_ids=np.asarray(ids, dtype=np.int64), weights=np.ones(len(ids), dtype=np.float32)
    )


def document_rows(
    tokenizer: Tokenizer,
    text: str,
    *,
    max_length: int,
    end_of_sequence: bool,
    begins: bool = True,
    ends: bool = True,
) -> Iterator[Row]:
    """A document, with its end-of-sequence token if wanted, cut into rows of `max_length` tokens.

    A last row of one token would have nothing to be predicted from: it begins one token earlier.
    An empty document gives no row.  Of a piece that does not begin or end the document, the tokens
    that the tokenizer puts there are left out.
    """
    if not text:
        return
    ids = token_ids(tokenizer, text, add_special_tokens=begins and ends)
    if begins != ends:
        opening, closing = _special_ends(tokenizer)
        ids = opening + ids if begins else ids + closing
    eos = tokenizer.eos_token_id
    if ends and end_of_sequence and eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    for start in range(0, len(ids), max_length):
        lone = 0 < start == len(ids) - 1
        yield text_row(ids[start - lone : start + max_length])


def _special_ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind every text."""
    plain, whole = token_ids(tokenizer, "a", add_special_tokens=False), token_ids(tokenizer, "a")
    starts = range(len(whole) - len(plain) + 1)
    start = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def prompt_completion_row(
    tokenizer: Tokenizer, prompt: str, completion: str, *, completion_only: bool
) -> Row:
    """Tokens of prompt + completion + end-of-sequence; the prompt's are not supervised.

    The ids are `tokenizer(prompt + completion)`, as in TRL, and the end-of-sequence token unless
    they end with it already.  The prompt's are the ids on which `tokenizer(prompt)` agrees, from
    the left.  Where a token spans the border ("A: " before "Two" becomes " Two"), TRL counts the
    prompt's ids and leaves that token out; here it counts as completion, because the prompt alone
    does not contain it.  The final end-of-sequence token always counts as completion.
    """
    ids, prompt_ids = token_ids(tokenizer, prompt + completion), token_ids(tokenizer, prompt)
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    row = text_row(ids)
    if completion_only:
        completion_stop = len(ids) - (ids[-1:] == [eos])
        row.weights[: min(common_prefix(ids, prompt_ids), completion_stop)] = 0.0
    return row


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text; rows are cut later, so the tokenizer need not warn of long ones."""
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many items agree from the left."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return min(len(first), len(second))
