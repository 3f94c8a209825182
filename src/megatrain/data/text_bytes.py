"""How many bytes of text the targets of rows stand for.

A target's bytes are what it adds to the decoded row: the UTF-8 bytes of the row's tokens up to and
with it, less those of the tokens before it, decoded without special tokens.  A character that
several tokens share counts with the token that completes it, and not at all where a row begins or
ends within it.  So a special token (end of sequence, end of turn) has no bytes, though its loss
counts, and the first token of a row has neither, because nothing predicts it.
"""

from collections.abc import Iterable

import numpy as np

from megatrain.data.rows import Row
from megatrain.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""What a decoder puts in the place of bytes that are no character yet."""


def supervised_bytes(rows: Iterable[Row], tokenizer: Tokenizer) -> float:
    """UTF-8 bytes of the text of all targets, each with its target's weight.

    Price: two decodings for each run of targets with one weight.
    """
    return sum(_bytes_of_row(row, tokenizer) for row in rows)


def _bytes_of_row(row: Row, tokenizer: Tokenizer) -> float:
    weights = row.weights.copy()
    weights[:1] = 0.0
    borders = np.flatnonzero(np.diff(weights)) + 1
    counted = 0.0
    for start, stop in zip([0, *borders], [*borders, len(weights)], strict=True):
        if weights[start]:
            before, after = (_num_bytes(tokenizer, row, end) for end in (start, stop))
            counted += float(weights[start]) * (after - before)
    return counted


def _num_bytes(tokenizer: Tokenizer, row: Row, end: int) -> int:
    text = tokenizer.decode(
        row.input_ids[:end].tolist(),
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return len(text.strip(UNFINISHED).encode("utf-8"))
