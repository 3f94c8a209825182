"""Which tokens of a conversation the assistant wrote.

Chat templates rarely say so (`{% generation %}`), and stock tooling then silently gives an all-zero
mask.  Here the conversation is rendered up to each assistant turn, with the generation prompt, and
after it: what the turn added is the assistant's, its end included (with the white space that a
template writes after the end-of-turn token).

Some templates render a turn in another way once later turns follow (Qwen3 drops its reasoning,
Phi-3 and gpt-oss close the last turn differently), or open a generation with more than a finished
turn has (DeepSeek-R1 adds `<think>`).  There the turn is found by putting a marker in place of
contents, and taken only if the marker shows that nothing outside of the turn depends on what the
assistant said.  Everything else is refused.

Price: two renderings a turn, up to seven where a marker is needed, and one a conversation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.data.roles import check_order
from megatrain.data.rows import Row
from megatrain.data.supervision import common_prefix, text_row, token_ids
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError

ROLES = ("system", "user", "assistant", "tool", "developer")
MARKER = "\ue000turn\ue000"
"""Private-use characters: no template trims them, no text holds them."""

Message = dict[str, Any]
Span = tuple[int, int]
"""First character and the one after the last."""
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
    chat = _conversation(tokenizer, messages, place, tools)
    whole = chat.render(chat.messages)
    if assistant_only:
        spans = chat.assistant_spans(whole, prompt_messages)
        of_spans = [messages[index].get(WEIGHT) for index in spans]
    else:
        start = chat.prompt_length(whole, prompt_messages) if prompt_messages else 0
        spans, of_spans = {0: (start, len(whole))}, [None]
        _check_unweighted(messages, place)
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
    chat = _conversation(tokenizer, messages, place)
    rendered = chat.render(chat.messages, generation=True)
    return token_ids(tokenizer, rendered, add_special_tokens=False)


def end_of_turn(tokenizer: Tokenizer) -> list[int]:
    """The token with which the chat template ends an assistant's turn, if it is one of its own."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARKER}]
    chat = _conversation(tokenizer, turns, "a first turn")
    _, _, rest = chat.render(chat.messages).partition(MARKER)
    ids = token_ids(tokenizer, rest.strip(), add_special_tokens=False)
    return [token for token in ids[:1] if token in tokenizer.added_tokens_decoder]


def _conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    place: str,
    tools: Sequence[Any] | None = None,
) -> "_Conversation":
    """Messages that are in order, and a tokenizer that has a template."""
    check_messages(messages, place)
    check_order(messages, place)
    if not tokenizer.chat_template:
        raise UserError(
            asked=f"chat messages at {place}",
            found="a tokenizer without a chat template",
            change="use an instruction-tuned model, or prompt/completion columns",
        )
    return _Conversation(
        tokenizer=tokenizer, messages=list(messages), place=place, tools=tools or None
    )


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


@dataclass(frozen=True, kw_only=True)
class _Conversation:
    """Renderings of one conversation and its parts."""

    tokenizer: Tokenizer
    messages: list[Message]
    place: str
    tools: Sequence[Any] | None

    def render(self, messages: list[Message], *, generation: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                asked=f"chat messages at {self.place}",
                found=f"a chat template that does not take them ({str(error).rstrip('.')})",
                change="mend the order of roles and the contents, or give another template",
            ) from error
        return str(rendered)

    def assistant_spans(self, whole: str, first: int) -> dict[int, Span]:
        """Characters of each assistant turn from message `first` on, by the message's number."""
        self._check_contents_show()
        return {
            index: self.turn_span(whole, index)
            for index, message in enumerate(self.messages)
            if index >= first and message["role"] == "assistant"
        }

    def _check_contents_show(self) -> None:
        """Templates made for lists of parts leave plain texts out without a word."""
        plain = [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and isinstance(message.get("content"), str)
        ]
        if plain and self._marked(self.messages, plain[-1]) is None:
            raise UserError(
                asked=f"supervise the assistant's turns at {self.place}",
                found="a chat template that does not show the assistant's content, or twice",
                change="give contents in the form that the template takes, or another template",
            )

    def prompt_length(self, whole: str, prompt_messages: int) -> int:
        """Characters before the first message after the prompt, generation prompt included."""
        if self.messages[prompt_messages]["role"] == "assistant":
            return self.turn_span(whole, prompt_messages)[0]
        prompt = self.render(self.messages[:prompt_messages])
        if not whole.startswith(prompt):
            raise self._refusal()
        return len(prompt)

    def turn_span(self, whole: str, index: int) -> Span:
        """Characters of one assistant turn in the whole conversation."""
        before = ""
        if index:
            before = self.render(self.messages[:index], generation=True)
            after = self.render(self.messages[: index + 1])
            if whole.startswith(after) and after.startswith(before):
                return len(before), len(after)
        span = self._marked_span(whole, index, before)
        if span is None:
            raise self._refusal()
        return span

    def _marked_span(self, whole: str, index: int, before: str) -> Span | None:
        """The turn, found by its surroundings; None where they do not tell."""
        turn = self._marked(self.messages, index)
        if turn is None:
            return None
        lead, rest = turn
        # A first message has no generation prompt: all that comes before its content is prompt.
        start = _agreement(before, lead) if index else len(lead)
        if start is None or not whole.startswith(lead[:start]):
            return None
        end = self._turn_end(whole, index, start, before)
        return (start, end) if end is not None and rest.endswith(whole[end:]) else None

    def _turn_end(self, whole: str, index: int, start: int, before: str) -> int | None:
        """Where the last end-of-turn text before the next message's content ends."""
        if index == len(self.messages) - 1:
            return len(whole)
        following = self._marked(self.messages, index + 1)
        if following is None or not whole.startswith(following[0]):
            return None
        for tail in self._tails(index, before):
            found = whole.rfind(tail, start, len(following[0]))
            if tail.strip() and found >= 0:
                return found + len(tail)
        return None

    def _tails(self, index: int, before: str) -> Iterator[str]:
        """Texts that may close an assistant's turn, likeliest first.

        The very last turn may be closed in another way than one before it: by the end-of-sequence
        token after all (Phi-3), or instead of the end-of-turn token (gpt-oss).
        """
        alone = [*self.messages[:index], {"role": "assistant", "content": ""}]
        last = self._marked(alone, index)
        if last is not None:
            yield last[1]
            if self.tokenizer.eos_token_id is not None:
                yield last[1].removesuffix(self.tokenizer.decode([self.tokenizer.eos_token_id]))
        more = self._marked(alone, index, generation=True)
        earlier = self.render(self.messages[:index]) if index else before
        opening = before.removeprefix(earlier)
        if more is not None and before.startswith(earlier) and more[1].endswith(opening):
            yield more[1].removesuffix(opening)

    def _marked(
        self, messages: list[Message], index: int, *, generation: bool = False
    ) -> tuple[str, str] | None:
        """What is rendered before and after one content; None if it shows not just once."""
        message = messages[index] | {"content": MARKER}
        marked = [*messages[:index], message, *messages[index + 1 :]]
        parts = self.render(marked, generation=generation).split(MARKER)
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def _refusal(self) -> UserError:
        return UserError(
            asked=f"supervise the assistant's turns at {self.place}",
            found="a chat template that rewrites earlier turns when later ones follow",
            change="give a template that only appends, or prompt/completion columns",
        )


def _agreement(before: str, lead: str) -> int | None:
    """Characters of the generation prompt that a finished turn begins with, too.

    One of them may say more (an empty reasoning, or an opened one), and the prompt may end in white
    space that the turn does not have; a different header is not one that the turn can be told by.
    """
    if before.startswith(lead):
        return len(lead)
    for opening in (before, before.rstrip()):
        if lead.startswith(opening):
            return len(opening)
    return None


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
