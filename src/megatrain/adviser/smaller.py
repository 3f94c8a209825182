"""Changes to a run after which it may fit."""

from collections.abc import Iterator
from dataclasses import replace

from megatrain.adviser.question import Question
from megatrain.hardware import GPUS
from megatrain.units import format_bytes

SHORTEST_ROW = 256
"""Tokens; shorter rows are not proposed."""
SMALLEST_POOL = 2**28
"""Bytes of checkpoint_memory; less is not proposed."""


def smaller_kinds(
    question: Question, *, pool: int, parts: int | None
) -> Iterator[Iterator[tuple[str, Question]]]:
    """Changes that need less; of each kind the smallest first.

    Args:
        question: about the run.
        pool: bytes for checkpoints on their way.
        parts: blocks that a layer's experts are in; None: there are no experts.
    """
    yield (
        (
            f"checkpoint_memory: {format_bytes(n).replace('.00 ', '')}"
            " (of a config; training waits longer)",
            question.with_checkpoint_memory(n),
        )
        for n in _halves(2 ** pool.bit_length())
        if SMALLEST_POOL <= n < pool
    )
    if parts is not None:
        yield (
            (f"expert_parts: {n}", question.with_expert_parts(n)) for n in (2 * parts, 4 * parts)
        )
    if question.max_grad_norm:
        yield iter([("max_grad_norm: 0", replace(question, max_grad_norm=0.0))])
    if question.offload:
        yield iter([("without offload", replace(question, offload={}))])
    if (tokens := question.micro_tokens) is not None:
        yield ((f"micro_batch_tokens: {n}", question.with_micro_tokens(n)) for n in _halves(tokens))
    else:
        yield (
            (f"--micro-rows {n}", replace(question, micro_rows=n))
            for n in _halves(question.micro_rows)
        )
    yield (
        (f"--rows {n}", replace(question, rows=n, micro_rows=min(n, question.micro_rows)))
        for n in _halves(question.rows)
    )
    yield (
        (f"--length {n}", replace(question, length=n))
        for n in _halves(question.length)
        if n >= SHORTEST_ROW
    )
    if question.gpu_memory is not None:
        eighths = (part * question.gpu.memory_bytes // 8 // 2**30 for part in range(1, 9))
        yield (
            (f"gpu_memory: {n}GiB", replace(question, gpu_memory=n * 2**30))
            for n in eighths
            if n * 2**30 > question.device_memory
        )
    larger = [gpu for gpu in GPUS.values() if gpu.memory_bytes > question.gpu.memory_bytes]
    yield (
        (
            f"a GPU of {format_bytes(gpu.memory_bytes)}, such as {gpu.name}",
            replace(question, gpu=gpu, gpu_memory=None, measured=None),
        )
        for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes)
    )


def _halves(number: int) -> Iterator[int]:
    while number := number // 2:
        yield number
