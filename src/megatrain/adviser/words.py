"""Answers as text and as JSON."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatrain.adviser.adviser import Adviser
from megatrain.adviser.question import Question, whole_state
from megatrain.errors import UserError
from megatrain.hardware import GPUS
from megatrain.models.parts import parts_in_words
from megatrain.planner.answer import Answer, HostTooSmallError
from megatrain.schedule import Lane
from megatrain.units import format_bytes, format_enough

LANES = {
    Lane.COMPUTE: "the GPU's computation",
    Lane.HOST: "the host's updates",
    Lane.H2D: "the bus to the GPU",
    Lane.D2H: "the bus from the GPU",
    Lane.DISK_READ: "reading from the disk",
    Lane.DISK_WRITE: "writing to the disk",
}


def describe(question: Question, found: Answer, adviser: Adviser) -> Iterator[str]:
    """The answer for a person, in lines."""
    params = adviser.model.num_params
    micro = f"of {question.micro_rows}"
    if question.micro_tokens is not None:
        micro = f"of up to {question.micro_tokens} tokens"
    yield (
        f"{question.model} on one {question.gpu.name}: {params / 1e9:.2f}B parameters,"
        f" {len(adviser.model.blocks)} blocks; {question.rows} rows of {question.length} tokens a"
        f" step, micro-batches {micro}, max_grad_norm {question.max_grad_norm:g}"
    )
    if said := parts_in_words(adviser.placed(question)):
        yield said
    for tier, parts in found.bytes_by_tier().items():
        yield f"{tier:7} {format_bytes(sum(parts.values())):>11}"
        for name, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
            yield f"        {format_bytes(nbytes):>11}  {name}"
    placement = found.placement
    spilled = 0 if placement.spill is None else len(placement.spill.blocks)
    yield (
        f"on the GPU: state of {len(placement.resident)} blocks, activations of"
        f" {len(placement.saved)} layers; inputs of {spilled} layers on the host"
        + (f"; {len(placement.put_off)} updates put off" if placement.put_off else "")
    )
    if found.disk is not None:
        disk = found.disk
        yield (
            f"on the disk: state of {len(disk.tier.blocks)} blocks; a step reads"
            f" {format_bytes(disk.read_bytes)} and writes {format_bytes(disk.written_bytes)}"
        )
    if not found.time_known:
        yield (
            f"at least {placement.seconds:.3g} s a step; how long it takes is not known without the"
            " disk's rate (--disk-rate, such as 3GB)"
        )
        return
    flops = found.model_flops / placement.seconds
    yield (
        f"{placement.seconds:.3g} s a step, {found.tokens_per_s:,.0f} tokens/s,"
        f" {flops / 1e12:.0f} TFLOPS, MFU {flops / question.gpu.bf16_flops_per_s:.0%}; the limit is"
        f" {LANES.get(found.limit, found.limit)} ({found.lanes_busy[found.limit]:.0%} busy)"
    )


def whole_run(question: Question, found: Answer, tokens: float) -> str:
    """Time, energy and wear of so many tokens."""
    parts = []
    if found.time_known:
        hours, power = tokens / found.tokens_per_s / 3600, question.gpu.power_w
        parts.append(f"{hours:,.1f} h")
        if power is not None:
            parts.append(f"up to {hours * power / 1e3:,.1f} kWh of the GPU")
    if found.disk is not None:
        written = tokens / found.tokens * found.disk.written_bytes
        parts.append(f"{written / 1e12:,.1f} TB written to the disk")
    return f"{tokens / 1e9:g}B tokens: {', '.join(parts)}"


def compare(
    adviser: Adviser, question: Question, tokens: float, say: Callable[[str], None]
) -> bool:
    """One line for each known GPU; whether the model fits any."""
    fits = False
    say(f"{'GPU':14} {'host memory':>12} {'s a step':>9} {'tokens/s':>9} {'hours':>9}  limit")
    for gpu in GPUS.values():
        asked = replace(question, gpu=gpu)
        try:
            found = adviser.ask(asked)
        except HostTooSmallError as error:
            say(f"{gpu.name:14} {format_enough(error.needed):>12} more than there is")
            continue
        except UserError as error:
            say(f"{gpu.name:14} does not fit: {error.found}")
            continue
        fits = True
        hours = tokens / found.tokens_per_s / 3600
        say(
            f"{gpu.name:14} {format_bytes(found.need.host_total):>12}"
            f" {found.placement.seconds:9.3g} {found.tokens_per_s:9,.0f} {hours:9,.1f}"
            f"  {LANES.get(found.limit, found.limit)}"
        )
    return fits


def refusal(question: Question, error: UserError, adviser: Adviser) -> Iterator[str]:
    """Why it does not fit, and what would."""
    yield f"does not fit: {error.asked}: {error.found}"
    yield f"(weights, residuals and moments alone are {format_bytes(whole_state(adviser.model))})"
    changes = list(adviser.smaller(question))
    yield "what would make it fit, one by one:" if changes else "no single change makes it fit"
    yield from (f"  {change}" for change in changes)


def figures(question: Question, found: Answer | None) -> dict[str, Any]:
    """For a program to read."""
    asked = {
        "model": question.model,
        "rows": question.rows,
        "length": question.length,
        "micro_rows": question.micro_rows,
        "micro_batch_tokens": question.micro_tokens,
        "max_grad_norm": question.max_grad_norm,
        "gpu": question.gpu.name,
        "gpu_memory": question.gpu_memory,
        "host_memory": question.host_memory,
        "update_params_per_s": question.update_params_per_s,
        "disk_memory": question.disk_memory,
        "disk_bytes_per_s": question.disk_bytes_per_s,
    }
    return asked | ({"fits": False} if found is None else found.figures())
