"""A source to tokenised rows, with counts of what was cut and what was left out.

Promise: no record is lost uncounted.  Price: 8 bytes a token stay, in memory or in a token cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.data.cache import TokenCache
from megatrain.data.files import find_files
from megatrain.data.formats import DataOptions, check_options, detect_format
from megatrain.data.gather import Gathered
from megatrain.data.rows import DatasetStats, TokenizedRows
from megatrain.data.source import Source, files_source
from megatrain.data.tokenise import Task, default_processes, tokenise
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError


def load_rows(
    data: Source | str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    options: DataOptions,
    *,
    cache: TokenCache | None = None,
    processes: int | None = None,
) -> TokenizedRows:
    """Tokenise all records of a source; their format is read off the very first record.

    Args:
        data: a source, or files, folders and globs.
        tokenizer: the model's own.
        options: how records become rows.
        cache: where the rows are taken from and kept; without one they are kept in memory.
        processes: that tokenise; None: as many as the size of the files and the machine suggest.

    Raises:
        UserError: for unreadable input, an empty dataset, one in which nothing is supervised, or a
            token or a position that the model does not have.
    """
    check_options(options)
    source = data if isinstance(data, Source) else _of_files(data)
    if source.format is not None:
        options = replace(options, format=source.format)
    # Without files nothing says whether the records are those of the last time.
    entry = cache.entry(source, tokenizer, options) if cache is not None and source.files else None
    rows = None if entry is None else entry.open()
    if rows is None or not _fits(rows.stats, options):  # what does not fit is found again, by place
        if processes is None:
            processes = default_processes(sum(file.stat().st_size for file in source.files))
        task = Task(tokenizer=tokenizer, options=options)
        chunks = tokenise(source.records(), task, processes=processes)
        if entry is not None:
            rows = entry.build(chunks)
        else:
            gathered = Gathered()
            for chunk in chunks:
                gathered.take(chunk)
            rows = gathered.rows()
    if not rows.stats.rows:
        raise UserError(
            asked=f"rows from {source.name}",
            found=_nothing(rows.stats, options.max_length),
            change="check the columns, max_length and the chat template",
        )
    return rows


def _of_files(paths: str | Path | Sequence[str | Path]) -> Source:
    files = find_files(paths)
    return files_source(", ".join(map(str, files)), files)


def dataset_format(data: Source | str | Path | Sequence[str | Path], options: DataOptions) -> str:
    """The format of a source, or of files: as asked for, or as the first record has it.

    Raises:
        UserError: for unreadable input, or columns of no format.
    """
    check_options(options)
    source = data if isinstance(data, Source) else _of_files(data)
    if source.format is not None or options.format != "auto":
        return source.format or options.format
    for record in source.records():
        return detect_format(record, options)
    return options.format


def _fits(stats: DatasetStats, options: DataOptions) -> bool:
    """Whether a model has all tokens and positions; a cache is made for any model."""
    vocab_size, positions = options.vocab_size, options.max_positions
    return (vocab_size is None or stats.largest_token < vocab_size) and (
        positions is None or stats.longest <= positions
    )


def _nothing(stats: DatasetStats, max_length: int) -> str:
    if not stats.records:
        return "no record: nothing is in the files"
    if not (stats.truncated or stats.dropped):
        rest = stats.skipped - stats.empty
        return (
            f"{stats.records} records, no supervised token in any ({stats.empty} are empty, {rest}"
            " have no assistant's turn, completion or label that counts)"
        )
    dropped = f", {stats.dropped} rows are longer than that" if stats.dropped else ""
    return (
        f"{stats.records} records, no supervised token in any ({stats.empty} are empty,"
        f" {stats.skipped - stats.empty} have none within the first {max_length} tokens{dropped})"
    )
