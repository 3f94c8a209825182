"""Which tokens of a row are targets.

Chat templates rarely say which part the assistant wrote, and stock tooling then silently gives an
all-zero mask.  Here the conversation is rendered up to each assistant turn and after it: what the
turn added is the assistant's, end-of-turn token included.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.data.rows import Row
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError

ROLES = ("system", "user", "assistant", "tool", "developer")


def text_row(ids: Sequence[int]) -> Row:
    """Every token supervised."""
    return Row(
        input_ids=np.asarray(ids, dtype=np.int64), weights=np.ones(len(ids), dtype=np.float32)
    )


def prompt_completion_row(
    tokenizer: Tokenizer, prompt: str, completion: str, *, completion_only: bool
) -> Row:
    """Tokens of prompt + completion + end-of-sequence; the prompt's are not supervised.

    The text is tokenised as a whole, as it will be in use; where the prompt's own tokenisation
    ends differently, a token that spans the border counts as completion.
    """
    ids = list(tokenizer(prompt + completion)["input_ids"])
    prompt_ids = list(tokenizer(prompt)["input_ids"])
    eos = tokenizer.eos_token_id
    if prompt_ids and prompt_ids[-1] == eos:  # tokenizers that close every text
        prompt_ids.pop()
    if eos is not None and (not ids or ids[-1] != eos):
        ids.append(eos)
    same = 0
    while same < min(len(ids), len(prompt_ids)) and ids[same] == prompt_ids[same]:
        same += 1
    row = text_row(ids)
    if completion_only:
        row.weights[:same] = 0.0
    return row


def chat_row(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], place: str, *, assistant_only: bool
) -> Row:
    """A conversation through the model's chat template; the assistant's turns are supervised.

    Raises:
        UserError: for bad messages, a missing template, or one whose rendering of a conversation
            does not begin with its rendering of the earlier turns.
    """
    _check_messages(messages, place)
    if not tokenizer.chat_template:
        raise UserError(
            asked=f"chat messages at {place}",
            found="a tokenizer without a chat template",
            change="use an instruction-tuned model, or prompt/completion columns",
        )
    whole = _render(tokenizer, messages, False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], True)
        after = _render(tokenizer, messages[: index + 1], False)
        if not whole.startswith(after) or not after.startswith(before):
            raise UserError(
                asked=f"supervise the assistant's turns at {place}",
                found="a chat template that rewrites earlier turns when later ones follow",
                change="give a template that only appends, or prompt/completion columns",
            )
        spans.append((len(before), len(after)))
    ids, weights = _tokens_in_spans(tokenizer, whole, spans)
    row = text_row(ids)
    if assistant_only:
        row.weights[:] = weights
    return row


def _render(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], prompt: bool) -> str:
    rendered = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt
    )
    return str(rendered)


def _tokens_in_spans(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Token ids of a rendered conversation, weight 1 where a token begins inside a span.

    White space that a template puts after the end-of-turn token belongs to the turn too.
    """
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        starts = [start for start, _ in encoded["offset_mapping"]]
    else:  # no offsets: tokenise the pieces between the borders one by one
        ids, starts = [], []
        borders = sorted({0, len(text), *(border for span in spans for border in span)})
        for start, stop in pairwise(borders):
            piece = list(tokenizer(text[start:stop], add_special_tokens=False)["input_ids"])
            ids += piece
            starts += [start] * len(piece)
    weights = np.zeros(len(ids), dtype=np.float32)
    for position, start in enumerate(starts):
        weights[position] = any(first <= start < last for first, last in spans)
    return ids, weights


def _check_messages(messages: Any, place: str) -> None:
    asked, change = f"chat messages at {place}", 'use [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, list) or not messages:
        raise UserError(asked=asked, found="no list of messages", change=change)
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(asked=asked, found="a message without role or content", change=change)
        if message["role"] not in ROLES:
            raise UserError(
                asked=asked,
                found=f"the role '{message['role']}'",
                change=f"use one of {', '.join(ROLES)}",
            )
