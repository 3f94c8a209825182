"""Which tokens of a conversation the assistant wrote.

Chat templates rarely say so (`{% generation %}`), and stock tooling then silently gives an all-zero
mask.  Here the conversation is rendered up to each assistant turn, with the generation prompt, and
after it: what the turn added is the assistant's, its end included (with the white space that a
template writes after the end-of-turn token).

Some templates render a turn in another way once later turns follow (Qwen3 drops its reasoning,
Phi-3 and gpt-oss close the last turn differently), or open a generation with more than a finished
turn has (DeepSeek-R1 adds `<think>`).  There the turn is found by putting a marker in place of
contents, and taken only if the marker shows that nothing outside of the turn depends on what the
assistant said.  Everything else is refused, and so is a template that leaves out what it was given
(`megatrain.data.shown`).

Price: one rendering a conversation, two a turn, up to seven where a marker is needed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.data.roles import check_order
from megatrain.data.rows import Row
from megatrain.data.shown import check_all_shown
from megatrain.data.supervision import common_prefix, text_row, token_ids
from megatrain.data.tokenizer import Tokenizer
from megatrain.data.tool_calls import with_object_arguments, with_text_arguments
from megatrain.data.turns import MARKER, Conversation, Message, Span
from megatrain.errors import UserError

ROLES = ("system", "user", "assistant", "tool", "developer")
WEIGHT = "weight"
"""Key of an assistant's message that says how much its tokens count as targets: 0, 1 or another."""


def chat_row(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    place: str,
    *,
    assistant_only: bool,
    prompt_messages: int = 0,
    tools: Sequence[Any] | None = None,
) -> Row:
    """A conversation through the model's chat template.

    Args:
        tokenizer: the model's, with a chat template.
        messages: with role and content.
        place: where they stand, for errors.
        assistant_only: supervise only what the assistant wrote.
        prompt_messages: the first so many messages are a prompt, which is not supervised.
        tools: descriptions of tools for the template.

    Raises:
        UserError: for bad messages, a missing template, or one that renders earlier turns in such
            a way that the assistant's cannot be told from the rest.
    """
    chat, whole = _rendered(tokenizer, messages, place, tools or None)
    if assistant_only:
        spans = chat.assistant_spans(whole, prompt_messages)
        of_spans = [messages[index].get(WEIGHT) for index in spans]
    else:
        start = chat.prompt_length(whole, prompt_messages) if prompt_messages else 0
        spans, of_spans = {0: (start, len(whole))}, [None]
        _check_unweighted(messages, place)
    check_all_shown(chat, whole, spans if assistant_only else {})
    ids, weights = _tokens_in_spans(
        tokenizer,
        whole,
        list(spans.values()),
        [1.0 if weight is None else float(weight) for weight in of_spans],
    )
    row = text_row(ids)
    row.weights[:] = weights
    return row


def generation_prompt(tokenizer: Tokenizer, messages: Sequence[Message], place: str) -> list[int]:
    """Token ids of a conversation up to where the assistant's next turn begins.

    Raises:
        UserError: for bad messages, a missing template, or one that does not take them.
    """
    chat, _ = _rendered(tokenizer, messages, place, None)
    rendered = chat.render(chat.messages, generation=True)
    return token_ids(tokenizer, rendered, add_special_tokens=False)


def end_of_turn(tokenizer: Tokenizer) -> list[int]:
    """The token with which the chat template ends an assistant's turn, if it is one of its own."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARKER}]
    _, whole = _rendered(tokenizer, turns, "a first turn", None)
    _, _, rest = whole.partition(MARKER)
    ids = token_ids(tokenizer, rest.strip(), add_special_tokens=False)
    return [token for token in ids[:1] if token in tokenizer.added_tokens_decoder]


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], place: str, tools: Sequence[Any] | None
) -> tuple[Conversation, str]:
    """The conversation and its text; arguments of calls in the form that the template takes.

    Raises:
        UserError: for bad messages, a missing template, or one that does not take them.
    """
    check_messages(messages, place)
    check_order(messages, place)
    if not tokenizer.chat_template:
        raise UserError(
            asked=f"chat messages at {place}",
            found="a tokenizer without a chat template",
            change="use an instruction-tuned model, or prompt/completion columns",
        )
    objects = with_object_arguments(messages, place)
    chat = Conversation(tokenizer=tokenizer, messages=objects, place=place, tools=tools)
    try:
        return chat, chat.render(objects)
    except UserError:
        texts = with_text_arguments(objects)
        if texts == objects:
            raise
        chat = replace(chat, messages=texts)
        return chat, chat.render(texts)


def _check_unweighted(messages: Sequence[Message], place: str) -> None:
    if any(message.get(WEIGHT) is not None for message in messages):
        raise UserError(
            asked=f"chat messages at {place} with a weight",
            found="assistant_only_loss: false, where every token counts the same",
            change="remove the weights, or set assistant_only_loss: true",
        )


def check_messages(messages: Any, place: str) -> None:
    """Refuse what is not a list of messages with known roles and texts.

    Raises:
        UserError: naming the message.
    """
    asked, change = f"chat messages at {place}", 'use [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, list) or not messages:
        raise UserError(asked=asked, found="no list of messages", change=change)
    for number, message in enumerate(messages):
        calls = isinstance(message, dict) and message.get("tool_calls")
        needed = {"role"} if calls else {"role", "content"}
        if not isinstance(message, dict) or not needed <= message.keys():
            found = f"a message without role or content (number {number})"
            raise UserError(asked=asked, found=found, change=change)
        if message["role"] not in ROLES:
            raise UserError(
                asked=asked,
                found=f"the role '{message['role']}' (message {number})",
                change=f"use one of {', '.join(ROLES)}",
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and calls):
            found = f"content that is a {type(content).__name__} (message {number})"
            raise UserError(asked=asked, found=found, change=change)
        _check_weight(message, f"{asked}, message {number}")


def _check_weight(message: Message, asked: str) -> None:
    weight = message.get(WEIGHT)
    if weight is None:
        return
    fits = isinstance(weight, int | float) and 0 <= weight < float("inf")
    if not fits or message["role"] != "assistant":
        raise UserError(
            asked=asked,
            found=f"a weight of {weight} for role '{message['role']}'",
            change="give the assistant's messages a number from 0, and others none",
        )


def _tokens_in_spans(
    tokenizer: Tokenizer, text: str, spans: Sequence[Span], of_spans: Sequence[float]
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Token ids of a rendered conversation; one that shares a character with a span has its weight.

    Without offsets, a border lies where the ids of the text up to it stop agreeing with the ids of
    the whole.
    """
    if not tokenizer.is_fast:
        ids = token_ids(tokenizer, text, add_special_tokens=False)
        weights = np.zeros(len(ids), dtype=np.float32)
        for (first, last), weight in zip(spans, of_spans, strict=True):
            start, _ = _border(tokenizer, ids, text[:first])
            agreed, length = _border(tokenizer, ids, text[:last])
            weights[start : agreed + (agreed < length)] = weight
        return ids, weights
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    weights = np.zeros(len(ids), dtype=np.float32)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    for (first, last), weight in zip(spans, of_spans, strict=True):
        weights[(offsets[:, 1] > first) & (offsets[:, 0] < last)] = weight
    return ids, weights


def _border(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[int, int]:
    """How many ids of a beginning agree with the whole's, and how many it has."""
    beginning = token_ids(tokenizer, text, add_special_tokens=False)
    return common_prefix(ids, beginning), len(beginning)
