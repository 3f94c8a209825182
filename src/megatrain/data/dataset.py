"""Files to tokenised rows, with counts of what was cut and what was left out.

Promise: no record is lost uncounted.  Price: one pass in this process; 8 bytes a token stay.
A cache of tokens would stand between `RowCollector` and `TokenizedRows`.
"""

from collections.abc import Sequence
from pathlib import Path

from megatrain.data.files import Record, find_files, read_records
from megatrain.data.formats import DataOptions, check_options, detect_format, record_rows
from megatrain.data.rows import DatasetStats, Row, RowCollector, TokenizedRows
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError


def load_rows(
    paths: str | Path | Sequence[str | Path], tokenizer: Tokenizer, options: DataOptions
) -> TokenizedRows:
    """Tokenise all records of all files; their format is read off the very first record.

    Args:
        paths: files, folders and globs.
        tokenizer: the model's own.
        options: how records become rows.

    Raises:
        UserError: for unreadable input, an empty dataset, one in which nothing is supervised, or a
            token or a position that the model does not have.
    """
    check_options(options)
    files = find_files(paths)
    collector = RowCollector(max_length=options.max_length)
    chosen = options.format
    for file in files:
        for record in read_records(file):
            if chosen == "auto":
                chosen = detect_format(record, options)
            rows = list(record_rows(record, chosen, tokenizer, options))
            _check_vocabulary(rows, record, options.vocab_size)
            collector.add_record(rows)
            _check_positions(collector.longest, record, options.max_positions)
    stats = collector.stats()
    if not stats.rows:
        raise UserError(
            asked=f"rows from {', '.join(map(str, files))}",
            found=_nothing(stats, options.max_length),
            change="check the columns, max_length and the chat template",
        )
    return collector.finish()


def _check_vocabulary(rows: Sequence[Row], record: Record, vocab_size: int | None) -> None:
    largest = max((int(row.input_ids.max(initial=0)) for row in rows), default=0)
    smallest = min((int(row.input_ids.min(initial=0)) for row in rows), default=0)
    if smallest < 0:
        raise UserError(
            asked=f"the tokens of {record.place}",
            found=f"token {smallest}",
            change="give token ids from 0",
        )
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            asked=f"the tokens of {record.place}",
            found=f"token {largest}, and a model that has {vocab_size} tokens",
            change="use the model's own tokenizer, or from scratch raise vocab_size in config.json",
        )


def _check_positions(longest: int, record: Record, max_positions: int | None) -> None:
    if max_positions is not None and longest > max_positions:
        raise UserError(
            asked=f"the {longest} tokens of {record.place} as one row",
            found=f"a model that has {max_positions} positions (max_position_embeddings)",
            change=f"set max_length to {max_positions} or less",
        )


def _nothing(stats: DatasetStats, max_length: int) -> str:
    if not stats.records:
        return "no record"
    return (
        f"{stats.records} records, no supervised token in any ({stats.empty} are empty,"
        f" {stats.records - stats.empty} have none within the first {max_length} tokens)"
    )
