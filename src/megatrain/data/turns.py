"""Where each assistant's turn stands in a rendered conversation.

Promise: nothing outside of a turn depends on what the assistant says in it; a template for which
that cannot be shown is refused.  How a turn is found: `megatrain.data.chat`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any

from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError

Message = dict[str, Any]
Span = tuple[int, int]
"""First character and the one after the last."""
MARKER = "\ue000turn\ue000"
"""Private-use characters: no template trims them, no text holds them."""
TODAY = date(2024, 7, 26)
"""What a template that asks for today's date is told: the date that Llama's own falls back to.
Tokens must not depend on the day, or a run could not be resumed on the next."""
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Renderings of one conversation and its parts."""

    tokenizer: Tokenizer
    messages: list[Message]
    place: str
    tools: Sequence[Any] | None

    def render(self, messages: list[Message], *, generation: bool = False) -> str:
        """Messages as text; with `generation`, and what asks the assistant to go on.

        Raises:
            UserError: with the template's own words, if it does not take them.
        """
        from jinja2 import TemplateError

        template = self.tokenizer.chat_template
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                chat_template=_of_one_day(template) if isinstance(template, str) else None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                asked=f"chat messages at {self.place}",
                found=f"a chat template that does not take them ({str(error).rstrip('.')})",
                change="mend the order of roles and the contents, or give another template",
            ) from error
        return str(rendered)

    def assistant_spans(self, whole: str, first: int) -> dict[int, Span]:
        """Characters of each assistant turn from message `first` on, by the message's number.

        Raises:
            UserError: where a turn has no surroundings of its own.
        """
        return {
            index: self.turn_span(whole, index)
            for index, message in enumerate(self.messages)
            if index >= first and message["role"] == "assistant"
        }

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
            last = index == len(self.messages) - 1
            after = whole if last else self.render(self.messages[: index + 1])
            if whole.startswith(after) and after.startswith(before):
                return len(before), len(after)
        span = self._marked_span(whole, index, before)
        if span is None:
            raise self._refusal()
        return span

    def _marked_span(self, whole: str, index: int, before: str) -> Span | None:
        """The turn, found by its surroundings; None where they do not tell."""
        turn = self.marked(self.messages, index)
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
        following = self.marked(self.messages, index + 1)
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
        last = self.marked(alone, index)
        if last is not None:
            yield last[1]
            if self.tokenizer.eos_token_id is not None:
                yield last[1].removesuffix(self.tokenizer.decode([self.tokenizer.eos_token_id]))
        more = self.marked(alone, index, generation=True)
        earlier = self.render(self.messages[:index]) if index else before
        opening = before.removeprefix(earlier)
        if more is not None and before.startswith(earlier) and more[1].endswith(opening):
            yield more[1].removesuffix(opening)

    def marked(
        self, messages: list[Message], index: int, *, generation: bool = False
    ) -> tuple[str, str] | None:
        """What is rendered before and after one content; None if it shows not just once."""
        message = messages[index] | {"content": MARKER}
        marked = [*messages[:index], message, *messages[index + 1 :]]
        try:
            parts = self.render(marked, generation=generation).split(MARKER)
        except UserError:  # no text at this place, such as beside a tool call
            return None
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def _refusal(self) -> UserError:
        return UserError(
            asked=f"supervise the assistant's turns at {self.place}",
            found="a chat template that rewrites earlier turns when later ones follow",
            change="give a template that only appends (chat_template_path), or prompt and"
            " completion as lists of messages, with one assistant turn as the completion",
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


@cache
def _of_one_day(template: str) -> str:
    """The template with dates in place of questions for today's."""
    return DATE_CALL.sub(lambda call: repr(TODAY.strftime(call[2])), template)
