"""`megatrain plan`: from what was typed to a `Question`, from an answer to what is printed."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from megatrain.adviser.adviser import Adviser
from megatrain.adviser.chosen_gpu import gpu_called, gpu_here
from megatrain.adviser.chosen_rates import GivenRates, known_rates
from megatrain.adviser.experts import mixture_figures
from megatrain.adviser.question import UNLIMITED, Question, Training
from megatrain.adviser.words import compare, describe, figures, refusal, whole_run
from megatrain.errors import UserError
from megatrain.models import BlockModel


def plan_run_of(
    model: str,
    *,
    rows: int,
    length: int,
    micro_rows: int | None,
    max_grad_norm: float,
    gpu: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    disk_memory: int | None,
    disk_path: str | None,
    rates: GivenRates,
    offload: Mapping[str, Any],
    training: Training,
    blocks: BlockModel | None,
    tokens: float,
    as_json: bool,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> bool:
    """Answer for one GPU, or compare all; whether it fits.

    Args:
        model, blocks: directory or id; whole layers, or None for those of its config.
        rows, length, micro_rows: of a step, a row in tokens, a micro-batch; None to choose those.
        max_grad_norm, offload, training: see `Question`.
        gpu, gpu_memory: its name, or all, and bytes of it; None for the one in this machine.
        host_memory: bytes; None for what is free here, and for no limit if all GPUs are compared.
        disk_memory: bytes of a disk for what the host has no room for; None: there is none.
        disk_path, rates: see `known_rates`.
        tokens, as_json: of the whole run; JSON instead of lines.
        say, note: take a line, of the answer and beside it.

    Raises:
        UserError: for a GPU or a model that is not known.
    """
    every = gpu is not None and gpu.lower() == "all"
    _check_together(disk_memory, rates.disk, micro_rows, every=every)
    question = Question(
        model=model,
        rows=rows,
        length=length,
        micro_rows=rows if micro_rows is None else min(micro_rows, rows),
        max_grad_norm=max_grad_norm,
        gpu=gpu_here() if gpu is None else gpu_called("H200" if every else gpu),
        gpu_memory=gpu_memory,
        host_memory=UNLIMITED if every and host_memory is None else host_memory,
        disk_memory=disk_memory,
        offload=offload,
        training=training,
        **known_rates(rates, disk_path, here=gpu is None, note=note),
    )
    adviser = Adviser(model if blocks is None else blocks)
    adviser.offload(question)  # its mistakes are no want of memory
    if micro_rows is None:
        question = adviser.with_micro_rows(question)
    if every:
        return compare(adviser, question, tokens, say)
    return _tell(adviser, question, tokens, say, as_json=as_json)


def _check_together(
    disk_memory: int | None, disk_rate: int | None, micro_rows: int | None, *, every: bool
) -> None:
    """A rate needs a disk; a comparison needs times, and the same micro-batches."""
    if disk_rate is not None and disk_memory is None:
        raise UserError(asked="--disk-rate", found="no disk", change="give --disk-memory too")
    if every and disk_memory is not None and disk_rate is None:
        found = "a disk whose rate is not known"
        raise UserError(asked="--gpu all", found=found, change="give --disk-rate too")
    if every and micro_rows is None:
        raise UserError(
            asked="--gpu all with micro-batches that are chosen (auto)",
            found="micro-batches that would differ from GPU to GPU",
            change="name one GPU, or give --micro-rows a number",
        )


def _tell(
    adviser: Adviser,
    question: Question,
    tokens: float,
    say: Callable[[str], None],
    *,
    as_json: bool,
) -> bool:
    try:
        found = adviser.ask(question)
    except UserError as error:
        lines = refusal(question, error, adviser)
        say(json.dumps(figures(question, None)) if as_json else "\n".join(lines))
        return False
    mixture = mixture_figures(adviser, question, found)
    if as_json:
        of_mixture = {} if mixture is None else {"mixture": mixture.figures()}
        say(json.dumps(figures(question, found) | of_mixture))
        return True
    say("\n".join(describe(question, found, adviser)))
    if mixture is not None:
        say(mixture.words())
    say(whole_run(question, found, tokens))
    changes = list(adviser.faster(question, found)) if found.time_known else []
    if changes:
        say("faster would be, one by one:")
    for change in changes:
        say(f"  {change}")
    return True
