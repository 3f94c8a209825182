"""Files to tokenised rows, with counts of what was cut and what was left out.

Promise: no record is lost uncounted.  Price: one pass in this process; 8 bytes a token stay.
A cache of tokens, and packing, would stand between `RowCollector` and `TokenizedRows`.
"""

from collections.abc import Sequence
from pathlib import Path

from megatrain.data.files import find_files, read_records
from megatrain.data.formats import DataOptions, check_options, detect_format, record_rows
from megatrain.data.rows import DatasetStats, RowCollector, TokenizedRows
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
        UserError: for unreadable input, an empty dataset, or one in which nothing is supervised.
    """
    check_options(options)
    files = find_files(paths)
    collector = RowCollector(max_length=options.max_length)
    chosen = options.format
    for file in files:
        for record in read_records(file):
            if chosen == "auto":
                chosen = detect_format(record, options)
            collector.add_record(list(record_rows(record, chosen, tokenizer, options)))
    stats = collector.stats()
    if not stats.rows:
        raise UserError(
            asked=f"train on {', '.join(map(str, files))}",
            found=_nothing(stats, options.max_length),
            change="check the columns, max_length and the chat template",
        )
    return collector.finish()


def _nothing(stats: DatasetStats, max_length: int) -> str:
    if not stats.records:
        return "no record"
    return (
        f"{stats.records} records, no supervised token in any ({stats.empty} are empty,"
        f" {stats.records - stats.empty} have none within the first {max_length} tokens)"
    )
