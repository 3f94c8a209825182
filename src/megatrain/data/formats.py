"""Records to rows: which columns make which kind of row.

A new format is a name, its columns, and a branch of `record_rows`.
"""

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatrain.data.chat import chat_row, check_messages
from megatrain.data.conversations import (
    ALPACA_COLUMNS,
    alpaca_messages,
    alpaca_pair,
    sharegpt_messages,
)
from megatrain.data.files import Record
from megatrain.data.rows import Row
from megatrain.data.supervision import document_rows, prompt_completion_row, text_row
from megatrain.data.tokenizer import Tokenizer
from megatrain.data.turns import Message
from megatrain.errors import UserError

FORMATS = ("text", "prompt_completion", "messages", "sharegpt", "alpaca", "tokens")

EXCESS_LENGTH = ("truncate", "drop", "error")
PREFERENCE = {"chosen", "rejected"}
"""Columns of preference data, as TRL and LLaMA-Factory have it."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How records become rows."""

    max_length: int = 1024
    """Tokens per row; texts are cut into several rows."""
    excess_length_strategy: str = "truncate"
    """What becomes of longer rows, one of `EXCESS_LENGTH`: cut at the end, left out, or an error;
    the name is Axolotl's."""
    format: str = "auto"
    """auto, or one of `FORMATS`."""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    text_column: str = "text"
    completion_only_loss: bool | None = None
    """Leave the prompt unsupervised; None is, as in TRL, true for prompt/completion.  Texts and
    messages have no prompt."""
    assistant_only_loss: bool = True
    """Supervise only the assistant's turns, where there are messages.  Unlike TRL's default:
    whoever gives messages wants the assistant trained.  With prompt and completion as messages
    both limits hold: what is supervised is the assistant's *and* not in the prompt."""
    text_end_of_sequence: bool = True
    """Close each text with the end-of-sequence token."""
    vocab_size: int | None = None
    """Tokens that the model knows; a record with any other is refused.  None: not checked."""
    max_positions: int | None = None
    """Tokens for which the model has positions; a longer row is refused.  None: any length."""


def check_options(options: DataOptions) -> None:
    """Refuse options that no data could meet.

    Raises:
        UserError: naming the option.
    """
    if options.format not in ("auto", *FORMATS):
        near = difflib.get_close_matches(options.format, FORMATS, n=1)
        raise UserError(
            asked=f"the data format '{options.format}'",
            found="no such format" + (f" (there is '{near[0]}')" if near else ""),
            change=f"use auto or one of {', '.join(FORMATS)}",
        )
    if options.excess_length_strategy not in EXCESS_LENGTH:
        raise UserError(
            asked=f"excess_length_strategy: {options.excess_length_strategy}",
            found="no such strategy",
            change=f"use one of {', '.join(EXCESS_LENGTH)}",
        )
    if options.max_length < 2:
        raise UserError(
            asked=f"rows of at most {options.max_length} tokens",
            found="no room for a token and its target",
            change="set max_length to 2 or more",
        )
    if options.prompt_column == options.completion_column:
        raise UserError(
            asked=f"the column '{options.prompt_column}' as the prompt",
            found="the same column as the completion",
            change="name two different columns",
        )


def columns_of(record: Record, options: DataOptions) -> dict[str, set[str]]:
    """The columns that such a record has in each format, the richest format first."""
    return {
        "messages": {"messages"},
        "sharegpt": {"conversations"},
        "prompt_completion": {options.prompt_column, options.completion_column},
        "alpaca": set(ALPACA_COLUMNS),
        "tokens": {"input_ids"},
        "text": {_text_column(record, options)},
    }


def _text_column(record: Record, options: DataOptions) -> str:
    return "text" if record.plain else options.text_column


def check_same_format(record: Record, chosen: str, options: DataOptions) -> None:
    """Refuse a record of another format than the first one's, when that one was detected.

    Raises:
        UserError: naming both formats.  A column that is merely missing is told by `record_rows`.
    """
    wanted, columns = columns_of(record, options), set(record.value)
    other = next((name for name, needed in wanted.items() if needed <= columns), None)
    if other is not None and not wanted[chosen] <= columns:
        raise UserError(
            asked=f"{record.place} as {chosen}, the format of the first record",
            found=f"a record of the format {other}",
            change="keep one format, or set train_files to a mixture, {FILE: 1, OTHER: 1}, in which"
            " each has its own",
        )


def detect_format(record: Record, options: DataOptions) -> str:
    """The format whose columns the record has; the richest that it has them all of.

    Raises:
        UserError: naming the record's columns and the nearest wanted one.
    """
    columns = set(record.value)
    wanted = columns_of(record, options)
    found = next((name for name, needed in wanted.items() if needed <= columns), None)
    # In LLaMA-Factory's data a conversation beside them is their prompt; messages are a sample.
    if columns >= PREFERENCE and found in (None, "sharegpt"):
        raise UserError(
            asked=f"detect the format of {record.place}",
            found="preference data (columns chosen and rejected), and a trainer that supervises",
            change="to train on the chosen answers, set prompt_column, and completion_column:"
            " chosen, or rename chosen to messages if it holds whole conversations",
        )
    if found is not None:
        return found
    every = sorted(set().union(*wanted.values()) - columns)
    near = [(c, m) for c in sorted(columns) for m in difflib.get_close_matches(c, every, n=1)]
    near.sort(key=lambda pair: -difflib.SequenceMatcher(None, *pair).ratio())
    hint = f"rename a column to '{near[0][1]}' ('{near[0][0]}' is near), or " if near else ""
    raise UserError(
        asked=f"detect the format of {record.place}",
        found=f"the columns {', '.join(sorted(columns)) or 'none'}",
        change=f"{hint}set dataset_text_field, or prompt_column and completion_column, to the"
        " columns to train on",
    )


def record_rows(
    record: Record, chosen: str, tokenizer: Tokenizer, options: DataOptions
) -> Iterator[Row]:
    """The rows of one record: one, or for a text as many as it fills.

    Raises:
        UserError: for columns that are missing or of a wrong type, and bad messages.
    """
    if chosen == "prompt_completion":
        yield _pair_row(record, tokenizer, options)
    elif chosen == "alpaca" and not tokenizer.chat_template:
        only = options.completion_only_loss is not False
        yield prompt_completion_row(tokenizer, *alpaca_pair(record), completion_only=only)
    elif chosen in MESSAGES_OF:
        yield chat_row(
            tokenizer,
            MESSAGES_OF[chosen](record),
            record.place,
            assistant_only=options.assistant_only_loss,
            tools=_tools(record),
        )
    elif chosen == "tokens":
        yield _token_row(record)
    else:
        yield from document_rows(
            tokenizer,
            _column(record, _text_column(record, options), str),
            max_length=options.max_length,
            end_of_sequence=options.text_end_of_sequence,
            begins=record.begins,
            ends=record.ends,
        )


def _messages(record: Record) -> list[Message]:
    messages: list[Message] = _column(record, "messages", list)
    return messages


MESSAGES_OF: dict[str, Callable[[Record], list[Message]]] = {
    "messages": _messages,
    "sharegpt": sharegpt_messages,
    "alpaca": alpaca_messages,
}
"""Formats that are conversations."""

UNSUPERVISED = -100
"""In `labels`, as everywhere in torch."""
MASKS = ("completion_mask", "assistant_masks")
"""TRL's columns beside `input_ids`: 1 where a token is supervised."""


def _token_row(record: Record) -> Row:
    """`input_ids` as they are; `labels` and masks say which count as targets."""
    ids = _integers(record, "input_ids")
    row = text_row(ids)
    if "labels" in record.value:
        labels = np.asarray(_integers(record, "labels", like=len(ids)))
        row.weights[:] = labels != UNSUPERVISED
        other = (labels != UNSUPERVISED) & (labels != row.input_ids)
        if other.any():
            raise UserError(
                asked=f"labels at {record.place}",
                found=f"{labels[other][0]} where the token is {row.input_ids[other][0]}",
                change=f"repeat input_ids in labels, or say {UNSUPERVISED}; they are shifted here",
            )
    for name in MASKS:
        if record.value.get(name) is not None:
            row.weights[:] *= np.asarray(_integers(record, name, like=len(ids))) != 0
    return row


def _integers(record: Record, name: str, *, like: int | None = None) -> list[int]:
    values = _column(record, name, list)
    wrong = next((value for value in values if type(value) is not int), None)
    if wrong is not None or len(values) != (len(values) if like is None else like):
        found = f"{len(values)} of them beside {like} input_ids"
        raise UserError(
            asked=f"column '{name}' (integers) at {record.place}",
            found=found if wrong is None else f"a {type(wrong).__name__} among them",
            change="mend the record",
        )
    return list(values)


def _pair_row(record: Record, tokenizer: Tokenizer, options: DataOptions) -> Row:
    prompt = _column(record, options.prompt_column, (str, list))
    completion = _column(record, options.completion_column, (str, list))
    completion_only = options.completion_only_loss is not False
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt_completion_row(tokenizer, prompt, completion, completion_only=completion_only)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(
            asked=f"prompt and completion at {record.place}",
            found="one of them text, the other messages",
            change="make both text or both lists of messages",
        )
    check_messages(prompt, record.place)
    check_messages(completion, record.place)
    return chat_row(
        tokenizer,
        prompt + completion,
        record.place,
        assistant_only=options.assistant_only_loss,
        prompt_messages=len(prompt) if completion_only else 0,
        tools=_tools(record),
    )


def _tools(record: Record) -> list[Any] | None:
    """Descriptions of tools beside messages: a list, or its JSON as some hubs store it."""
    tools = record.value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except json.JSONDecodeError:
            tools = "no JSON"
    if not isinstance(tools, list | None):
        raise UserError(
            asked=f"column 'tools' at {record.place}",
            found=f"a {type(record.value['tools']).__name__} that is no list of tools",
            change="make it a list of JSON schemas, or leave it out",
        )
    return tools


def _column(record: Record, name: str, kind: type | tuple[type, ...]) -> Any:
    value = record.value.get(name)
    if not isinstance(value, kind):
        nearest = difflib.get_close_matches(name, list(record.value), n=1)
        near = f" (there is '{nearest[0]}')" if nearest and nearest[0] != name else ""
        found = "no such column" if name not in record.value else f"a {type(value).__name__}"
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(
            asked=f"column '{name}' ({kinds}) at {record.place}",
            found=found + near,
            change="mend the record, or name other columns",
        )
    return value
