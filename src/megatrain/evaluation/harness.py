"""Scores on tasks of EleutherAI's lm-evaluation-harness (the package lm_eval, an extra)."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.engine import Engine
from megatrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """What is scored, with the names of lm_eval."""

    tasks: Sequence[str]
    """Names of tasks, groups and tags; `*` matches."""
    include_path: Sequence[str] = ()
    """Folders with task files of one's own."""
    num_fewshot: int | None = None
    limit: float | None = None
    """Samples of each task; below 1 a share of them."""
    batch_size: int = 8
    """Rows that are computed at a time."""
    max_length: int | None = None
    """Tokens of context and continuation; None: as the model's config says."""
    apply_chat_template: bool = False
    system_instruction: str | None = None
    log_samples: bool = False
    """Keep every sample and what the model made of it."""


class Tasks(NamedTuple):
    """Tasks that exist."""

    names: list[str]
    manager: Any


def find_tasks(options: HarnessOptions) -> Tasks:
    """The tasks asked for.

    Raises:
        UserError: without lm_eval, for a folder that is not there, or a task that nobody knows.
    """
    asked = f"tasks {', '.join(options.tasks)}"
    try:
        # What torch, accelerate and the like warn of at their import is no business of a user's.
        from lm_eval.tasks import TaskManager

        import megatrain.evaluation.streamed_lm  # noqa: F401
    except ImportError as error:
        raise UserError(
            asked=asked,
            found=f"no lm-evaluation-harness that can be imported ({error})",
            change="install it (pip install 'megatrain[lm-eval]')",
        ) from error
    for folder in options.include_path:
        if not Path(folder).is_dir():
            raise UserError(
                asked=f"include_path: {folder}", found="no such folder", change="mend it"
            )
    manager = TaskManager(include_path=list(options.include_path) or None)
    names = []
    for pattern in options.tasks:
        found = manager.match_tasks([pattern])
        if not found:
            near = difflib.get_close_matches(pattern, manager.all_tasks, n=3)
            raise UserError(
                asked=f"the task {pattern}",
                found="no task, group or tag of that name"
                + (f" (there is {', '.join(near)})" if near else ""),
                change="name another (lm_eval ls tasks), or the folder of your own task files with"
                " --include-path",
            )
        names += [name for name in found if name not in names]
    return Tasks(names, manager)


def run_tasks(
    tasks: Tasks,
    engine: Engine,
    whole: Callable[[], AbstractContextManager[Any]],
    tokenizer: Any,
    options: HarnessOptions,
) -> dict[str, Any]:
    """What lm_eval's `simple_evaluate` returns.

    Args:
        tasks: from `find_tasks`.
        engine: scores rows, `options.batch_size` at a time.
        whole: gives the transformers model for generation.
        tokenizer: the model's.
        options: how.
    """
    import lm_eval

    from megatrain.evaluation.streamed_lm import StreamedLM

    model = StreamedLM(
        engine, whole, tokenizer, batch_size=options.batch_size, max_length=options.max_length
    )
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks.names,
        task_manager=tasks.manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        apply_chat_template=options.apply_chat_template,
        system_instruction=options.system_instruction,
        log_samples=options.log_samples,
    )
    return results


def scores(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The figures of each task and group, one dictionary each."""
    counts = results.get("n-samples", {})
    for name, figures in results["results"].items():
        row = {"task": name} | {key: value for key, value in figures.items() if key != "alias"}
        if name in counts:
            row["samples"] = counts[name]["effective"]
        yield row
