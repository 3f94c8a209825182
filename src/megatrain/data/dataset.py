"""Files to tokenised rows, with counts of what was cut and what was left out."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from megatrain.data.files import Record, find_files, read_records
from megatrain.data.rows import Row
from megatrain.data.supervision import chat_row, prompt_completion_row, text_row
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError

FORMATS = ("text", "prompt_completion", "messages")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How records become rows."""

    max_length: int = 1024
    """Tokens per row; longer rows are cut at the end, texts are cut into several rows."""
    format: str = "auto"
    """auto, or one of `FORMATS`."""
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    completion_only_loss: bool = True
    assistant_only_loss: bool = True
    """Unlike TRL's default: whoever gives messages wants the assistant trained."""


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """What became of the records."""

    records: int
    rows: int
    tokens: int
    supervised_tokens: int
    longest: int
    truncated: int
    """Rows that were longer than max_length."""
    skipped: int
    """Records with nothing to learn: no token, or none supervised after truncation."""


class TokenizedRows(Sequence[Row]):
    """Rows in three flat arrays: 8 bytes a token."""

    def __init__(self, rows: Iterable[Row], stats: DatasetStats) -> None:
        kept = list(rows)
        lengths = [len(row.input_ids) for row in kept]
        self._offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        empty = [np.zeros(0)]
        self._ids = np.concatenate([r.input_ids for r in kept] or empty).astype(np.int32)
        self._weights = np.concatenate([r.weights for r in kept] or empty).astype(np.float32)
        self.stats = stats

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, stop = self._offsets[index], self._offsets[index + 1]
        return Row(
            input_ids=self._ids[start:stop].astype(np.int64), weights=self._weights[start:stop]
        )


def load_rows(paths: Sequence[str], tokenizer: Tokenizer, options: DataOptions) -> TokenizedRows:
    """Tokenise all records of all files.

    Raises:
        UserError: for unreadable input, an empty dataset, or one in which nothing is supervised.
    """
    rows: list[Row] = []
    records = truncated = skipped = 0
    chosen = options.format
    for file in find_files(paths):
        for record in read_records(file):
            records += 1
            if chosen == "auto":
                chosen = detect_format(record, options)
            kept = 0
            for row in _rows_of(record, chosen, tokenizer, options):
                truncated += len(row.input_ids) > options.max_length
                cut = _truncate(row, options.max_length)
                if cut.weights[1:].any():
                    rows.append(cut)
                    kept += 1
            skipped += kept == 0
    if not rows:
        reason = "no record" if not records else f"{records} records, no supervised token in any"
        raise UserError(
            asked=f"train on {', '.join(paths)}",
            found=reason,
            change="check the columns, max_length and the chat template",
        )
    stats = DatasetStats(
        records=records,
        rows=len(rows),
        tokens=sum(len(row.input_ids) for row in rows),
        supervised_tokens=sum(int((row.weights[1:] > 0).sum()) for row in rows),
        longest=max(len(row.input_ids) for row in rows),
        truncated=truncated,
        skipped=skipped,
    )
    return TokenizedRows(rows, stats)


def detect_format(record: Record, options: DataOptions) -> str:
    """The format whose columns the record has.

    Raises:
        UserError: naming the record's columns and the nearest wanted one.
    """
    columns = set(record.value)
    wanted = {
        "messages": {"messages"},
        "prompt_completion": {options.prompt_column, options.completion_column},
        "text": {"text"},
    }
    for name, needed in wanted.items():
        if needed <= columns:
            return name
    every = sorted(set().union(*wanted.values()))
    near = [m for c in sorted(columns) for m in difflib.get_close_matches(c, every, n=1)]
    hint = f"rename a column to '{near[0]}', or " if near else ""
    raise UserError(
        asked=f"detect the format of {record.place}",
        found=f"the columns {', '.join(sorted(columns)) or 'none'}",
        change=f"{hint}set prompt_column and completion_column to the columns to train on",
    )


def _rows_of(
    record: Record, chosen: str, tokenizer: Tokenizer, options: DataOptions
) -> Iterator[Row]:
    if chosen == "messages":
        messages = _column(record, "messages", list)
        yield chat_row(
            tokenizer, messages, record.place, assistant_only=options.assistant_only_loss
        )
    elif chosen == "prompt_completion":
        kind = (str, list)
        prompt = _column(record, options.prompt_column, kind)
        completion = _column(record, options.completion_column, kind)
        if isinstance(prompt, list) != isinstance(completion, list):
            raise UserError(
                asked=f"prompt and completion at {record.place}",
                found="one of them text, the other messages",
                change="make both text or both lists of messages",
            )
        if isinstance(prompt, list):
            yield chat_row(
                tokenizer,
                prompt + completion,
                record.place,
                assistant_only=options.completion_only_loss,
            )
        else:
            yield prompt_completion_row(
                tokenizer, prompt, completion, completion_only=options.completion_only_loss
            )
    else:
        yield from _text_rows(_column(record, "text", str), tokenizer, options.max_length)


def _text_rows(text: str, tokenizer: Tokenizer, max_length: int) -> Iterator[Row]:
    """A document and its end-of-sequence token, cut into rows of `max_length` tokens."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if ids and tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    for start in range(0, len(ids), max_length):
        yield text_row(ids[start : start + max_length])


def _column(record: Record, name: str, kind: type | tuple[type, ...]) -> Any:
    value = record.value.get(name)
    if not isinstance(value, kind):
        nearest = difflib.get_close_matches(name, list(record.value), n=1)
        near = f" (there is '{nearest[0]}')" if nearest and nearest[0] != name else ""
        found = "no such column" if name not in record.value else f"a {type(value).__name__}"
        raise UserError(
            asked=f"column '{name}' at {record.place}",
            found=found + near,
            change="mend the record, or name other columns",
        )
    return value


def _truncate(row: Row, max_length: int) -> Row:
    return Row(input_ids=row.input_ids[:max_length], weights=row.weights[:max_length])


def split_rows(rows: Sequence[Row], held_out: float, *, seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out) row numbers; `held_out` is a count, or a fraction below 1.

    Raises:
        UserError: if one of the two parts would be empty.
    """
    count = round(held_out * len(rows)) if held_out < 1 else round(held_out)
    if not 0 < count < len(rows):
        raise UserError(
            asked=f"hold out {held_out} of {len(rows)} rows",
            found="nothing left for one of the two parts",
            change="choose a smaller or larger share",
        )
    order = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, 2**32]))
    ).permutation(len(rows))
    return sorted(map(int, order[count:])), sorted(map(int, order[:count]))
