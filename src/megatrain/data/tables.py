"""Rows of parquet and arrow files, through pyarrow, a batch at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

TABLES = (".parquet", ".arrow", ".feather")
BATCH_ROWS = 1024


def read_table(file: Path) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries, nested values as lists and dictionaries.

    Raises:
        UserError: without pyarrow, or for a file that it cannot read.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            asked=f"data from {file}",
            found="no pyarrow, which reads such files",
            change="install it (pip install 'megatrain[data]'), or convert the file to .jsonl",
        ) from error
    try:
        for batch in _batches(file):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        found = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            asked=f"data from {file}", found=found, change="write or copy it again"
        ) from error


def _batches(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        yield from parquet.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS)
        return
    from pyarrow import ArrowInvalid, ipc, memory_map

    with memory_map(str(file)) as source:
        try:
            reader = ipc.open_file(source)
        except ArrowInvalid:  # datasets writes streams
            source.seek(0)
            yield from ipc.open_stream(source)
            return
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
