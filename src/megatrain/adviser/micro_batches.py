"""A run whose split into micro-batches is left to the machine (`auto`): proposed, then measured.

The planner proposes, by the rule of `plan --micro-rows auto`; the run then measures a micro-batch
of that size as any run does, and goes to the next smaller one as long as there is no room.
Price: the planner's seconds, and a compilation for each size that is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatrain.adviser.adviser import AS_FAST, Adviser, even_splits
from megatrain.adviser.chosen_gpu import known_gpu
from megatrain.adviser.chosen_rates import GivenRates, known_rates
from megatrain.adviser.question import Question, Training
from megatrain.engine import EngineOptions
from megatrain.engine.device import free_device_bytes, release_cached_memory
from megatrain.engine.options import padding_of
from megatrain.errors import NoRoomError
from megatrain.models import BlockModel
from megatrain.models.parts import most_parts
from megatrain.placing import Budgets, RunPlan

CPU_TOKENS = 2048
"""Of a micro-batch on the CPU, where activations are not counted (docs/performance.md)."""
UNKNOWN_GPU_TOKENS = 16_384
"""Of a micro-batch on a GPU whose rates nobody knows: enough for full speed on an H200."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The split of a run that this one goes on from."""

    checkpoint: str
    """Its name."""
    tokens: int
    """Of a micro-batch."""


def plan_in_micro_batches(
    measure: Callable[[EngineOptions], RunPlan],
    model: BlockModel,
    options: EngineOptions,
    *,
    device: torch.device,
    num_rows: int,
    longest: int,
    budgets: Budgets,
    offload: Mapping[str, Any],
    earlier: Earlier | None = None,
) -> RunPlan:
    """The plan of a run in the micro-batches that suit the machine; it says which and why.

    Args:
        measure: `plan_run` of the rest.
        model, options, device, num_rows, longest, budgets: as for `plan_run`; what the options say
            of micro-batches does not count.
        offload: as in the config; `budgets` has what it means.
        earlier: kept if there is room for it, so that gradients are summed in the same order.

    Raises:
        UserError: if the run does not fit in the smallest.
    """
    length = padding_of(model, options).length(longest)
    sizes = [1] if model.random else even_splits(num_rows)
    if earlier is None:
        question = _question_here(
            model,
            options,
            device=device,
            rows=num_rows,
            length=length,
            budgets=budgets,
            offload=offload,
        )
        rows, why = propose(model, sizes, length=length, device=device, question=question)
        first = rows * length
    else:
        first, why = earlier.tokens, f"as in {earlier.checkpoint}"
    tried: list[int] = []
    for tokens in [first, *(n * length for n in reversed(sizes) if n * length < first)]:
        tried.append(tokens)
        try:
            plan = measure(replace(options, micro_batch_tokens=tokens))
            break
        except NoRoomError:
            if tokens <= sizes[0] * length:
                raise
        release_cached_memory(device)  # only here: the error's traceback has held tensors
    words = _in_words(tried, why, length=length, num_rows=num_rows, earlier=earlier)
    return replace(plan, notices=(words, *plan.notices))


def _question_here(
    model: BlockModel,
    options: EngineOptions,
    *,
    device: torch.device,
    rows: int,
    length: int,
    budgets: Budgets,
    offload: Mapping[str, Any],
) -> Question | None:
    """The run as `plan` would ask about it on this machine; None where rates are not known."""
    gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    path, free = budgets.disk_path, free_device_bytes(device)
    assert free is not None
    return Question(
        model="this run",
        rows=rows,
        length=length,
        max_grad_norm=options.max_grad_norm,
        gpu=gpu,
        gpu_memory=min(free, budgets.gpu or free),
        host_memory=budgets.host,
        disk_memory=None if path is None else budgets.scratch_bytes,
        offload=offload,
        training=Training(
            engine=replace(options, micro_batch_tokens=None),
            expert_parts=most_parts(model) or None,
            checkpoint_memory=lambda _: budgets.checkpoint,
        ),
        # The plan itself tells of kept rates.
        **known_rates(GivenRates(), str(path) if path else None, here=True, note=lambda _: None),
    )


def propose(
    model: BlockModel,
    sizes: Sequence[int],
    *,
    length: int,
    device: torch.device,
    question: Question | None,
) -> tuple[int, str]:
    """Rows of a micro-batch to begin with, and why so many.

    Args:
        model: of the run.
        sizes: that there may be, ascending.
        length: padded tokens of the longest row.
        device: where blocks are computed.
        question: about the run; None where no rates are known.
    """
    if len(sizes) == 1:
        return sizes[0], "dropout takes one row at a time" if model.random else "there is one row"
    if question is not None:
        best = Adviser(model.whole).best_micro_rows(question)
        if best is None:
            return sizes[0], "by its estimate the planner finds room for none"
        return best, f"the largest whose step is within {AS_FAST - 1:.0%} of the fastest, estimated"
    most, where = CPU_TOKENS, "on the CPU"
    if device.type == "cuda":
        most, where = UNKNOWN_GPU_TOKENS, "on a GPU whose rates are not known (bench --calibrate)"
    rows = max((n for n in sizes if n * length <= most), default=sizes[0])
    return rows, f"{most} at most {where}"


def _in_words(
    tried: Sequence[int], why: str, *, length: int, num_rows: int, earlier: Earlier | None
) -> str:
    """Which, why, and what had no room; another split than before is told."""
    *too_large, tokens = tried
    rows = max(1, min(tokens // length, num_rows))
    words = (
        f"micro_batch_tokens {tokens}, chosen: {rows} of the step's {num_rows} rows at a time if"
        f" they have {length} tokens ({why})"
    )
    if too_large:
        words += f"; measured, there was no room for {', '.join(map(str, too_large))}"
    if too_large and earlier is not None:
        words += f": gradients are summed in another order than in {earlier.checkpoint}"
    return words
