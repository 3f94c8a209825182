"""Prompts for generation: texts as they are, or messages for the model's chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.data.chat import generation_prompt
from megatrain.data.files import Record, find_files, read_records
from megatrain.data.supervision import token_ids
from megatrain.data.tokenizer import Tokenizer
from megatrain.data.turns import Message
from megatrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What text is to follow."""

    value: str | list[Message]
    place: str
    """Where it stands, for errors."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.value, str)

    def as_chat(self) -> "Prompt":
        """A text as what a user says."""
        if not isinstance(self.value, str):
            return self
        return Prompt(value=[{"role": "user", "content": self.value}], place=self.place)


def read_prompts(paths: Sequence[str], column: str) -> list[Prompt]:
    """A prompt of each record of files: `messages`, or the column, which may hold messages too.

    Raises:
        UserError: for unreadable input, a record that has neither, or no record at all.
    """
    found = [_prompt(record, column) for file in find_files(paths) for record in read_records(file)]
    if not found:
        raise UserError(
            asked=f"prompts from {', '.join(paths)}", found="no record", change="add one"
        )
    return found


def _prompt(record: Record, column: str) -> Prompt:
    value: Any = record.value.get(column, record.value.get("messages"))
    if not isinstance(value, str | list):
        raise UserError(
            asked=f"a prompt at {record.place}",
            found=f"the columns {', '.join(sorted(record.value)) or 'none'}",
            change=f"give '{column}' a text or a list of messages, or name another prompt_column",
        )
    return Prompt(value=value, place=record.place)


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids: the tokenizer's own special tokens before a text, the template's in a chat."""
    if isinstance(prompt.value, str):
        return token_ids(tokenizer, prompt.value)
    return generation_prompt(tokenizer, prompt.value, prompt.place)
