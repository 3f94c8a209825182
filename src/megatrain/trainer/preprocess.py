"""`megatrain preprocess`: what the data of a config becomes, before anything is trained on it."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from megatrain.config import TrainConfig
from megatrain.data import DatasetStats, Row
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError
from megatrain.models.hub import find_model
from megatrain.preflight import find_gguf
from megatrain.trainer.model import load_run_tokenizer
from megatrain.trainer.prepare import load_data, make_sampler

BINS = 8
SUPERVISED, REST = "bold green", "dim"


def preprocess(config: TrainConfig, sample: int) -> Iterator[Table | Text | str]:
    """Things to print: counts, a histogram of lengths, and one row with its targets coloured.

    Args:
        config: of a run; its model's tokenizer is read, its weights are not.
        sample: number of the row to show.

    Raises:
        UserError: for data that cannot be read, or a row that is not there.
    """
    name, gguf_file = find_gguf(config.model_name_or_path, config.gguf_file)
    files = find_model(
        name, gguf_file=gguf_file, revision=config.model_revision, cache_dir=config.cache_dir
    )
    tokenizer = load_run_tokenizer(config, files)
    data = load_data(config, tokenizer)
    yield from data.notes
    yield f"read as {', '.join(data.formats)}"
    yield counts_table(data.stats)
    if len(data.parts) > 1:
        yield parts_table(data.parts)
    yield histogram(data.train_lengths, config.max_length)
    sampler = make_sampler(config, data)
    if packed := sampler.in_words():
        yield packed
    yield f"{sampler.steps_in(1)} steps an epoch, of {sampler.rows_per_step} rows"
    if not 0 <= sample < len(data.train_rows):
        raise UserError(
            asked=f"sample {sample}",
            found=f"{len(data.train_rows)} rows",
            change="give a number from 0 below that",
        )
    yield f"row {sample}; what is supervised is green"
    yield coloured(data.train_rows[sample], tokenizer)


def counts_table(stats: DatasetStats) -> Table:
    """What became of the records."""
    share = stats.supervised_tokens / max(stats.tokens, 1)
    table = Table("what", "count", show_header=False, box=None)
    for what, count in (
        ("records", stats.records),
        ("skipped: nothing supervised", stats.skipped),
        ("  of these with fewer than two tokens", stats.empty),
        ("rows", stats.rows),
        ("rows cut at max_length", stats.truncated),
        ("rows longer than max_length, dropped", stats.dropped),
        ("tokens", stats.tokens),
        (f"supervised tokens ({share:.0%})", stats.supervised_tokens),
        ("longest row", stats.longest),
    ):
        table.add_row(what, f"{count:,}")
    return table


def parts_table(parts: Mapping[str, Mapping[str, float]]) -> Table:
    """The parts of the data; of a mixture with what an epoch takes of each."""
    figures = list(next(iter(parts.values())))
    table = Table("part", *(name.replace("_", " ") for name in figures), box=None)
    for name, part in parts.items():
        table.add_row(name, *(f"{part[figure]:,}" for figure in figures))
    return table


def histogram(lengths: npt.NDArray[np.int64], max_length: int) -> Table:
    """Rows by their number of tokens, in equal bins up to `max_length`."""
    counts, edges = np.histogram(lengths, bins=BINS, range=(0, max_length + 1))
    table = Table("tokens", "rows", "", box=None)
    for count, (low, high) in zip(counts, pairwise(edges), strict=True):
        bar = "█" * round(30 * int(count) / max(int(counts.max()), 1))
        table.add_row(f"{int(np.ceil(low))}-{int(np.ceil(high)) - 1}", f"{count:,}", bar)
    return table


def coloured(row: Row, tokenizer: Tokenizer) -> Text:
    """The text of a row, targets apart from the rest; neighbours alike are decoded together."""
    text = Text()
    supervised = row.weights > 0
    supervised[0] = False
    borders = [0, *(np.flatnonzero(np.diff(supervised)) + 1), len(supervised)]
    for start, stop in pairwise(borders):
        part = tokenizer.decode(row.input_ids[start:stop])
        text.append(part, style=SUPERVISED if supervised[start] else REST)
    return text
