"""Questions about runs of one model, and answers from its config alone."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from megatrain.adviser.chosen_rates import compute_of_gpu
from megatrain.adviser.question import UNLIMITED, Question
from megatrain.adviser.smaller import smaller_kinds
from megatrain.engine import step_plan
from megatrain.engine.device import DEVICE_RESERVE
from megatrain.engine.options import largest_shape
from megatrain.errors import UserError
from megatrain.models import BlockModel, build_on_meta, read_config, split_model
from megatrain.models.hub import find_model
from megatrain.models.parts import carried_inputs, in_parts, most_parts, num_experts
from megatrain.models.work import LayerWork, count_layers
from megatrain.placing import (
    Budgets,
    check_offload_of_parts,
    checkpoint_purposes,
    parts_that_fit,
    placement_rule,
    with_room_for_waiting,
    with_slots,
)
from megatrain.planner import DiskUse, Offload, PlacementRule, read_offload
from megatrain.planner.answer import Answer, HostTooSmallError, answer
from megatrain.planner.estimate import estimate_footprint, in_stages
from megatrain.preflight import find_gguf
from megatrain.units import format_enough

BETTER = 1.05
"""A change is worth telling from here on."""
AS_FAST = 1.02
"""Steps that take up to so much longer are as fast: the estimate knows no cost of launches, so of
their micro-batches the largest is taken."""


def even_splits(num_rows: int) -> list[int]:
    """Rows of a micro-batch, ascending, of which a whole number make a step."""
    return [rows for rows in range(1, num_rows + 1) if num_rows % rows == 0]


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
            yield f"host memory of {format_enough(least)}"
        fits = False
        on_disk = self._with_any_disk(question)
        if on_disk is not None:
            fits = True
            yield f"a disk of {format_enough(on_disk.nbytes)} for layers (disk_path, --disk-memory)"
        placed = self.placed(question)
        kinds = partial(
            smaller_kinds,
            pool=question.training.checkpoint_memory(placed),
            parts=(most_parts(placed) or 1) if num_experts(self.model) else None,
        )
        for kind in kinds(question):
            for words, changed in kind:
                if self.try_ask(changed) is not None:
                    fits = True
                    yield words
                    break
        if fits or least is not None:
            return
        for kind in kinds(question):
            for words, changed in kind:
                if (least := self.least_host_memory(changed)) is not None:
                    yield f"{words}, with host memory of {format_enough(least)}"
                    break

    def _with_any_disk(self, question: Question) -> DiskUse | None:
        """What would be on a disk that is large enough; None if that does not make it fit."""
        found = self.try_ask(replace(question, disk_memory=UNLIMITED))
        return None if found is None else found.disk


def _blocks_of(name: str) -> BlockModel:
    folder, gguf_file = find_gguf(name)
    files = find_model(folder, gguf_file=gguf_file)
    config = read_config(files.directory, gguf_file=files.gguf_file)
    built = build_on_meta(config, compute_dtype="bfloat16")
    return split_model(built, compute_dtype="bfloat16")
