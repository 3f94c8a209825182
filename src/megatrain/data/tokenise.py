"""Records to chunks of rows, in several processes if there is enough to do.

Promise: chunks come in the order of the records whatever the number of processes, and so does the
first error.  In flight are a few batches a process, so memory is bounded by the batches.

Price: processes are forked, so that a script needs no `if __name__ == "__main__"` and the tokenizer
is not loaded again; they use neither torch nor a GPU.
"""

import ctypes
import os
import signal
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from megatrain.data.files import Record
from megatrain.data.formats import DataOptions, check_same_format, detect_format, record_rows
from megatrain.data.rows import Row, RowChunk, RowCollector
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError

BATCH_RECORDS, BATCH_CHARACTERS = 256, 2**20
"""A batch ends with the record that reaches either."""
BATCHES_AHEAD = 3
"""Batches in flight for each process."""
MAX_PROCESSES = 16
BYTES_PER_PROCESS = 4 * 2**20
"""Below this much of data another process costs more than it saves."""
PR_SET_PDEATHSIG = 1
RUST_THREADS = "TOKENIZERS_PARALLELISM"


def default_processes(nbytes: int) -> int:
    """How many processes are worth starting for files of so many bytes."""
    return max(1, min(len(os.sched_getaffinity(0)), MAX_PROCESSES, nbytes // BYTES_PER_PROCESS))


@dataclass(frozen=True, kw_only=True)
class Task:
    """How records become rows."""

    tokenizer: Tokenizer
    options: DataOptions

    def batch(self, records: list[Record], chosen: str) -> RowChunk:
        """Rows of some records.

        Raises:
            UserError: for the first record that is bad, too long, or not of the model.
        """
        options = self.options
        drop = options.excess_length_strategy == "drop"
        collector = RowCollector(max_length=options.max_length, drop_longer=drop)
        for record in records:
            if options.format == "auto":
                check_same_format(record, chosen, options)
            rows = list(record_rows(record, chosen, self.tokenizer, options))
            check_tokens(rows, record.place, options.vocab_size)
            if options.excess_length_strategy == "error":
                _check_length(rows, record.place, options.max_length)
            collector.add_record(rows)
            check_positions(collector.longest, record.place, options.max_positions)
        return collector.chunk()


def tokenise(records: Iterable[Record], task: Task, *, processes: int) -> Iterator[RowChunk]:
    """Rows of all records, in order; their format is read off the very first one.

    Args:
        records: are read here, in this process.
        task: what to do with them.
        processes: 1 does it here.

    Raises:
        UserError: for the first bad record, or a process that was killed.
    """
    batches = _batches(records, task.options)
    if processes == 1:
        for batch, chosen in batches:
            yield task.batch(batch, chosen)
        return
    context = get_context("fork")
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(task, os.getpid()))
    flying: deque[Future[RowChunk]] = deque()
    try:
        for batch, chosen in batches:
            with _quiet_fork():
                flying.append(pool.submit(_run, batch, chosen))
            if len(flying) >= processes * BATCHES_AHEAD:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except UserError:
        while flying:  # what is wrong with an earlier record comes first
            yield flying.popleft().result()
        raise
    except BrokenProcessPool as error:
        raise UserError(
            asked=f"tokenise in {processes} processes",
            found="one of them was killed, which the system does when memory runs out",
            change="set dataset_num_proc to a smaller number",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_task: Task | None = None
"""Of a process that tokenises."""


def _begin(task: Task, parent: int) -> None:
    """In a new process: Ctrl-C is the parent's, and it does not outlive the parent."""
    global _task
    _task = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(records: list[Record], chosen: str) -> RowChunk:
    assert _task is not None
    return _task.batch(records, chosen)


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Threads of the tokenizers library do not survive a fork, of which it warns unless told."""
    before = os.environ.get(RUST_THREADS)
    os.environ[RUST_THREADS] = "false"
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; nothing here waits for theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ[RUST_THREADS]
        else:
            os.environ[RUST_THREADS] = before


def _batches(records: Iterable[Record], options: DataOptions) -> Iterator[tuple[list[Record], str]]:
    """(records, their format), enough of them to be worth handing over."""
    chosen, batch, characters = options.format, list[Record](), 0
    failed: UserError | None = None
    try:
        for record in records:
            if chosen == "auto":
                chosen = detect_format(record, options)
            batch.append(record)
            characters += _characters(record.value)
            if len(batch) >= BATCH_RECORDS or characters >= BATCH_CHARACTERS:
                yield batch, chosen
                batch, characters = [], 0
    except UserError as error:
        failed = error  # later than what is wrong with the records before it
    if batch:
        yield batch, chosen
    if failed is not None:
        raise failed


def _characters(value: Any) -> int:
    """About how much there is to tokenise."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value)) + 4 * len(value)  # integers count, too
    return 0


def check_tokens(rows: list[Row], place: str, vocab_size: int | None) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        UserError: naming the token.
    """
    largest = max((int(row.input_ids.max(initial=0)) for row in rows), default=0)
    smallest = min((int(row.input_ids.min(initial=0)) for row in rows), default=0)
    if smallest < 0:
        raise UserError(
            asked=f"the tokens of {place}",
            found=f"token {smallest}",
            change="give token ids from 0",
        )
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            asked=f"the tokens of {place}",
            found=f"token {largest}, and a model that has {vocab_size} tokens",
            change="use the model's own tokenizer, or from scratch raise vocab_size in config.json",
        )


def check_positions(longest: int, place: str, max_positions: int | None) -> None:
    """Refuse rows for which the model has no positions.

    Raises:
        UserError: naming both lengths.
    """
    if max_positions is not None and longest > max_positions:
        raise UserError(
            asked=f"the {longest} tokens of {place} as one row",
            found=f"a model that has {max_positions} positions (max_position_embeddings; with"
            " longrope its original length, behind which the angles of all rows change)",
            change=f"set max_length to {max_positions} or less",
        )


def _check_length(rows: list[Row], place: str, max_length: int) -> None:
    longest = max((len(row.input_ids) for row in rows), default=0)
    if longest > max_length:
        raise UserError(
            asked=f"rows of at most {max_length} tokens (excess_length_strategy: error)",
            found=f"{longest} tokens at {place}",
            change="raise max_length, or set excess_length_strategy to truncate or drop",
        )
