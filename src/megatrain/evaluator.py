"""`megatrain eval`: a model's loss on files, or its score on tasks, streamed block by block."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.data import DataOptions, TokenCache, dataset_format, load_rows, supervised_bytes
from megatrain.evaluation import MICRO_BATCHES_A_PASS, EvalResult, evaluate_rows, total
from megatrain.evaluation.harness import HarnessOptions, find_tasks, run_tasks, scores
from megatrain.opening import ModelChoice, OpenModel

TO = "evaluate"


@dataclass(frozen=True, kw_only=True)
class FileResult:
    """Of one file, folder or glob as it was given."""

    name: str
    result: EvalResult


def evaluate_model(
    choice: ModelChoice,
    data: Sequence[str],
    *,
    options: DataOptions,
    batch_size: int = 8,
    cache: TokenCache | None = None,
) -> list[FileResult]:
    """Loss, perplexity and bits per byte of a model on each of some data sets.

    Args:
        choice: the model.
        data: files, folders and globs; the format of each is its own.
        options: how records become rows.
        batch_size: rows that are computed at a time.
        cache: of tokenised rows.

    Raises:
        UserError: for a model or data that cannot be used, before weights are loaded.
    """
    opened = OpenModel(choice, to=TO)
    model, tokenizer = opened.model, opened.tokenizer
    options = replace(options, vocab_size=model.vocab_size, max_positions=model.learned_positions)
    sets = []
    for name in data:
        chosen = dataset_format(name, options)
        rows = load_rows(name, tokenizer, options, cache=cache)
        # Whoever made the ids of tokenised rows need not have used this tokenizer.
        nbytes = None if chosen == "tokens" else supervised_bytes(rows, tokenizer)
        sets.append((name, rows, nbytes))
    with opened.weights() as store, opened.engine(store, micro_batch_rows=batch_size) as engine:
        return [
            FileResult(
                name=name,
                result=evaluate_rows(
                    engine, rows, batch_size * MICRO_BATCHES_A_PASS, supervised_bytes=nbytes
                ),
            )
            for name, rows, nbytes in sets
        ]


def describe(results: Sequence[FileResult]) -> Iterator[str]:
    """One JSON line each, and one more for the total of several."""
    for each in results:
        yield json.dumps({"file": each.name} | _figures(each.result))
    if len(results) > 1:
        sums = total(each.result for each in results)
        yield json.dumps({"files": len(results)} | _figures(sums))


def _figures(result: EvalResult) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "supervised_tokens": result.supervised_tokens,
        "supervised_bytes": result.supervised_bytes,
    }


def evaluate_tasks(choice: ModelChoice, options: HarnessOptions) -> dict[str, Any]:
    """Scores on tasks of EleutherAI's lm-evaluation-harness, as its `simple_evaluate` gives them.

    Raises:
        UserError: without lm_eval, for unknown tasks, or a model that cannot be used.
    """
    tasks = find_tasks(options)
    opened = OpenModel(choice, to=TO)
    with (
        opened.weights() as store,
        opened.engine(store, micro_batch_rows=options.batch_size) as engine,
        opened.whole(store) as whole,
    ):
        return run_tasks(tasks, engine, whole, opened.tokenizer, options)


def describe_tasks(results: dict[str, Any]) -> Iterator[str]:
    """One JSON line a task or group."""
    return map(json.dumps, scores(results))


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Everything that lm_eval tells, as one JSON object."""
    path.write_text(json.dumps(results, default=str, ensure_ascii=False, indent=2) + "\n")
