"""Questions about runs of one model, and answers from its config alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.adviser.chosen_rates import compute_of_gpu
from megatrain.engine import EngineOptions, step_plan
from megatrain.engine.device import DEVICE_RESERVE
from megatrain.engine.kept_rates import GpuRates
from megatrain.engine.options import largest_shape
from megatrain.errors import UserError
from megatrain.hardware import GPUS, Gpu
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models.hub import find_model
from megatrain.models.parts import carried_inputs, in_parts
from megatrain.models.work import LayerWork, count_layers
from megatrain.placing import (
    Budgets,
    check_offload_of_parts,
    checkpoint_purposes,
    default_checkpoint_memory,
    parts_that_fit,
    placement_rule,
    with_room_for_waiting,
    with_slots,
)
from megatrain.planner import DiskUse, Offload, PlacementRule, read_offload
from megatrain.planner.answer import Answer, DiskRoom, HostTooSmallError, answer, state_bytes
from megatrain.planner.estimate import estimate_footprint, in_stages, rates_of
from megatrain.preflight import find_gguf
from megatrain.schedule import Rates
from megatrain.units import format_bytes

BETTER = 1.05
"""A change is worth telling from here on."""
AS_FAST = 1.02
"""Steps that take up to so much longer are as fast: the estimate knows no cost of launches, so of
their micro-batches the largest is taken."""
SHORTEST_ROW = 256
UNLIMITED = 2**60
COMPILED = EngineOptions(compile_backend="inductor")


def even_splits(num_rows: int) -> list[int]:
    """Rows of a micro-batch, ascending, of which a whole number make a step."""
    return [rows for rows in range(1, num_rows + 1) if num_rows % rows == 0]


def whole_state(model: BlockModel) -> int:
    """Bytes of a checkpoint from which a run can go on."""
    return state_bytes([block.layout for block in model.blocks])


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a run trains, beside what a `Question` varies."""

    engine: EngineOptions = COMPILED
    """Its micro_batch_tokens go before a question's micro_rows."""
    expert_parts: int | None = None
    """Blocks of a layer's experts; None: as the GPU needs."""
    checkpoint_memory: Callable[[BlockModel], int] = default_checkpoint_memory
    """Bytes of the host for checkpoints on their way."""
    checkpoint_bytes: Callable[[BlockModel], int] = whole_state
    """Of a checkpoint on the disk."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run that might be."""

    model: str
    """Directory with a config.json, or an id."""
    rows: int = 32
    length: int = 1024
    micro_rows: int = 16
    max_grad_norm: float = 1.0
    gpu: Gpu
    gpu_memory: int | None = None
    """Bytes; None for all of it."""
    host_memory: int | None = None
    """Bytes; None for what is free here."""
    update_params_per_s: float
    """Of the host."""
    measured: GpuRates | None = None
    """Of this GPU; None: as its data sheet has them."""
    disk_memory: int | None = None
    """Bytes of a disk for state that the host has no room for; None: there is none."""
    disk_bytes_per_s: float | None = None
    """Read and written there, both at once; None: not known."""
    offload: Mapping[str, Any] = field(default_factory=dict)
    """See the config's key."""
    training: Training = Training()
    """What no change that is tried is about."""

    @property
    def device_memory(self) -> int:
        """Bytes that the run may use."""
        return min(self.gpu.memory_bytes, self.gpu_memory or UNLIMITED)

    @property
    def options(self) -> EngineOptions:
        """As the trainer would have them."""
        tokens = self.micro_tokens
        return replace(
            self.training.engine,
            micro_batch_rows=self.micro_rows,
            micro_batch_tokens=None if tokens is None else min(tokens, self.tokens),
            max_grad_norm=self.max_grad_norm,
            length_multiple=self.length,
        )

    @property
    def rates(self) -> Rates:
        """Of the machine."""
        updates = self.update_params_per_s
        if self.measured is None:
            return rates_of(self.gpu, update_params_per_s=updates)
        return self.measured.beside(updates)

    @property
    def micro_tokens(self) -> int | None:
        """Padded tokens of a micro-batch; None: micro_rows decide."""
        return self.training.engine.micro_batch_tokens

    def with_micro_tokens(self, tokens: int) -> "Question":
        """The same in micro-batches of so many."""
        engine = replace(self.training.engine, micro_batch_tokens=tokens)
        return replace(self, training=replace(self.training, engine=engine))

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length

    @property
    def disk_room(self) -> DiskRoom | None:
        if self.disk_memory is None:
            return None
        rate = self.disk_bytes_per_s
        return DiskRoom(nbytes=self.disk_memory, rates=None if rate is None else (rate, rate))


class Adviser:
    """Answers questions about one model; its layers are counted once for each row length.

    Args:
        model: directory or id, or blocks of whole layers.
    """

    def __init__(self, model: str | BlockModel) -> None:
        self.model = _blocks_of(model) if isinstance(model, str) else model
        self._works: dict[int, list[LayerWork]] = {}
        self._cut: dict[int, BlockModel] = {}

    def works(self, length: int) -> list[LayerWork]:
        """Of each layer, for a row of so many tokens."""
        if length not in self._works:
            self._works[length] = count_layers(self.model, length)
        return self._works[length]

    def cut(self, parts: int) -> BlockModel:
        """With the experts of a layer in so many blocks."""
        if parts not in self._cut:
            self._cut[parts] = in_parts(self.model, parts)
        return self._cut[parts]

    def model_flops(self, question: Question) -> float:
        """Of a step, forward and backward."""
        works = self.works(question.length)
        parts = [question.rows * (work.product_flops + work.attention_flops) for work in works]
        parts.append(2 * self.model.hidden_size * self.model.vocab_size * question.tokens)
        trained = step_plan(self.model, question.options).trainable
        lowest = trained.index(True)  # nothing below it is run backward
        return sum(
            flops * (1 + (block > lowest) + trained[block]) for block, flops in enumerate(parts, 1)
        )

    def offload(self, question: Question) -> Offload:
        """What is asked for.

        Raises:
            UserError: for what does not exist, or contradicts itself.
        """
        check_offload_of_parts(question.offload, self.placed(question))
        plan = step_plan(self.model, question.options)
        has_disk = question.disk_memory is not None
        return read_offload(question.offload, plan, has_gpu=True, has_disk=has_disk)

    def parts(self, question: Question) -> int | None:
        """In how many blocks the experts of a layer would be streamed; None: with their layer."""
        if question.training.expert_parts is not None:
            return question.training.expert_parts
        limit = question.device_memory - DEVICE_RESERVE
        return parts_that_fit(self.model, question.options, limit=limit, cut=self.cut)

    def placed(self, question: Question) -> BlockModel:
        """The model as it would be streamed."""
        parts = self.parts(question)
        return self.model if parts is None else self.cut(parts)

    def micro_batches(self, question: Question) -> tuple[int, int, int]:
        """(rows, tokens of a row, how many): none is larger, and no step has more of them."""
        return largest_shape(
            self.model, question.options, num_rows=question.rows, longest=question.length
        )

    def rule(self, question: Question) -> PlacementRule:
        """How the run would be placed."""
        model = self.placed(question)
        budgets = Budgets(
            host=question.host_memory,
            checkpoint=question.training.checkpoint_memory(model),
            offload=self.offload(question),
        )
        options = with_slots(question.options, budgets)
        options = with_room_for_waiting(model, options, budgets)
        rows, length, num_micro = self.micro_batches(question)
        footprint = estimate_footprint(
            self.works(question.length),
            compute=compute_of_gpu(question.gpu, question.measured),
            rates=question.rates,
            shape=(rows, length),
            hidden_size=self.model.hidden_size,
            vocab_size=self.model.vocab_size,
            chunk_tokens=options.chunk_tokens,
            item_bytes=4 if self.model.compute_dtype == "float32" else 2,
        )
        if model.stages:
            footprint = in_stages(
                footprint, [stage.layer for stage in model.stages], carried_inputs(model)
            )
        return placement_rule(
            model,
            options,
            footprint,
            num_micro=num_micro,
            device_limit=question.device_memory - DEVICE_RESERVE,
            budgets=budgets,
        )

    def ask(self, question: Question) -> Answer:
        """Place and simulate.

        Raises:
            UserError: if it does not fit.
        """
        placed = self.placed(question)
        pool = question.training.checkpoint_memory(placed)
        return answer(
            self.rule(question),
            tokens=question.tokens,
            model_flops=self.model_flops(question),
            beside=lambda on_disk: checkpoint_purposes(placed, pool, on_disk=on_disk),
            checkpoint_bytes=question.training.checkpoint_bytes(placed),
            room=question.disk_room,
        )

    def try_ask(self, question: Question) -> Answer | None:
        """None if it does not fit."""
        try:
            return self.ask(question)
        except UserError:
            return None

    def best_micro_rows(self, question: Question) -> int | None:
        """Rows of the micro-batches, of all that split its rows evenly, that suit a run best.

        None: it does not fit in any.
        """
        sizes = even_splits(question.rows)
        asked = {n: self.try_ask(replace(question, micro_rows=n)) for n in sizes}
        seconds = {n: found.placement.seconds for n, found in asked.items() if found is not None}
        limit = AS_FAST * min(seconds.values(), default=0.0)
        return max((n for n, each in seconds.items() if each <= limit), default=None)

    def with_micro_rows(self, question: Question) -> Question:
        """The same run in those micro-batches.

        If none fits: in those of the default, so that what is missing is told.
        """
        usual = min(question.rows, Question.micro_rows)
        return replace(question, micro_rows=self.best_micro_rows(question) or usual)

    def faster(self, question: Question, found: Answer) -> Iterator[str]:
        """Changes that would bring more tokens a second, each with what it would bring."""
        changes = {
            f"{2 * question.rows} rows a step (gradient_accumulation_steps)": replace(
                question, rows=2 * question.rows
            ),
            f"{4 * question.rows} rows a step": replace(question, rows=4 * question.rows),
            "max_grad_norm: 0": replace(question, max_grad_norm=0.0),
            "all of the GPU's memory": replace(question, gpu_memory=None),
            "a host that updates twice as fast": replace(
                question, update_params_per_s=2 * question.update_params_per_s
            ),
        }
        if found.disk is not None and question.disk_bytes_per_s is not None:
            changes["a disk twice as fast"] = replace(
                question, disk_bytes_per_s=2 * question.disk_bytes_per_s
            )
        for words, changed in changes.items():
            other = None if changed == question else self.try_ask(changed)
            if other is not None and other.tokens_per_s > BETTER * found.tokens_per_s:
                yield f"{words}: {other.tokens_per_s:,.0f} tokens/s"

    def least_host_memory(self, question: Question) -> int | None:
        """Bytes of host memory with which it fits; None if no such number does."""
        try:
            found = self.ask(replace(question, host_memory=1))
        except HostTooSmallError as error:
            return error.needed
        except UserError:
            return None
        return found.need.host_total

    def smaller(self, question: Question) -> Iterator[str]:
        """The smallest changes that would make it fit, one of a kind."""
        least = self.least_host_memory(question)
        if least is not None:
            yield f"host memory of {format_bytes(least)}"
        fits = False
        on_disk = self._with_any_disk(question)
        if on_disk is not None:
            fits = True
            yield f"a disk of {format_bytes(on_disk.nbytes)} for layers (disk_path, --disk-memory)"
        for kind in _smaller_kinds(question):
            for words, changed in kind:
                if self.try_ask(changed) is not None:
                    fits = True
                    yield words
                    break
        if fits or least is not None:
            return
        for kind in _smaller_kinds(question):
            for words, changed in kind:
                if (least := self.least_host_memory(changed)) is not None:
                    yield f"{words}, with host memory of {format_bytes(least)}"
                    break

    def _with_any_disk(self, question: Question) -> DiskUse | None:
        """What would be on a disk that is large enough; None if that does not make it fit."""
        found = self.try_ask(replace(question, disk_memory=UNLIMITED))
        return None if found is None else found.disk


def _smaller_kinds(question: Question) -> Iterator[Iterator[tuple[str, Question]]]:
    """Changes that need less; of each kind the smallest first."""
    if question.max_grad_norm:
        yield iter([("max_grad_norm: 0", replace(question, max_grad_norm=0.0))])
    if question.offload:
        yield iter([("without offload", replace(question, offload={}))])
    if (tokens := question.micro_tokens) is not None:
        yield ((f"micro_batch_tokens: {n}", question.with_micro_tokens(n)) for n in _halves(tokens))
    else:
        yield (
            (f"micro rows: {n}", replace(question, micro_rows=n))
            for n in _halves(question.micro_rows)
        )
    yield (
        (f"rows: {n}", replace(question, rows=n, micro_rows=min(n, question.micro_rows)))
        for n in _halves(question.rows)
    )
    yield (
        (f"length: {n}", replace(question, length=n))
        for n in _halves(question.length)
        if n >= SHORTEST_ROW
    )
    larger = [gpu for gpu in GPUS.values() if gpu.memory_bytes > question.gpu.memory_bytes]
    yield (
        (
            f"a GPU of {format_bytes(gpu.memory_bytes)}, such as {gpu.name}",
            replace(question, gpu=gpu, gpu_memory=None, measured=None),
        )
        for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes)
    )


def _blocks_of(name: str) -> BlockModel:
    folder, gguf_file = find_gguf(name)
    files = find_model(folder, gguf_file=gguf_file)
    config = read_config(files.directory, gguf_file=files.gguf_file)
    built = build_on_meta(config, compute_dtype="bfloat16")
    return split_model(built, compute_dtype="bfloat16")


def _halves(number: int) -> Iterator[int]:
    while number := number // 2:
        yield number
