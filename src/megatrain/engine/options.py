"""How the engine trains: its options, and the plan of a step that follows from them."""

import math
from dataclasses import dataclass, field, replace

from megatrain.engine.microbatch import NO_PADDING, Padding
from megatrain.errors import UserError
from megatrain.models import BlockKind, BlockModel
from megatrain.schedule import Spill, StepPlan


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """Constants of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine trains."""

    adamw: AdamWOptions = field(default_factory=AdamWOptions)
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    micro_batch_rows: int | None = None
    """Rows per micro-batch; None runs all rows of a step at once."""
    micro_batch_tokens: int | None = None
    """Padded tokens per micro-batch; takes precedence over rows."""
    gradient_dtype: str | None = None
    """dtype of a gradient while it waits for its update; None: the compute dtype."""
    loss_chunk_tokens: int | None = None
    """Supervised tokens whose logits exist at one time; None: 4096 if compiled (logits then stay in
    the compute dtype), else 1024."""
    seed: int = 0
    """Key of the randomness inside the model."""
    layer_weight_slots: int = 2
    layer_gradient_slots: int = 2
    waiting_gradient_slots: int = 2
    """Without clipping: layers whose gradients can wait on the host for their updates.  With it:
    those that can be on their way to the disk."""
    disk_slots: int = 3
    """Blocks of the disk whose state can be on the host at one time."""
    saved: frozenset[int] = frozenset()
    """Layers (by block number) that keep what backward needs instead of being recomputed."""
    spill: Spill | None = None
    """Inputs that wait for backward on the host."""
    put_off: frozenset[int] = frozenset()
    """Without clipping: blocks whose updates run beside the next forward."""
    always_with_graph: bool = False
    """Whether a layer is saved or not then changes no bit; recomputing becomes slower."""
    host_threads: int | None = None
    """Threads of the host update; None: all cores but two, at least one."""
    threads: bool | None = None
    """Run lanes on threads; None: on CUDA, and where blocks live on the disk."""
    allow_nonfinite_blocks: bool = False
    """Without clipping: go on after a block's gradient was not finite (its update is skipped)."""
    compile_backend: str | None = None
    """Compile layers and loss with this backend of torch.compile; None runs them as they are."""
    length_multiple: int = 1
    """Tokens to whose multiples compiled micro-batches are padded, so that shapes are few."""
    debug: bool = False
    """Verify every list and poison slots whose content is dead."""

    @property
    def chunk_tokens(self) -> int:
        """`loss_chunk_tokens`, or its default."""
        return self.loss_chunk_tokens or (4096 if self.compile_backend else 1024)


def step_plan(
    model: BlockModel,
    options: EngineOptions,
    *,
    resident: frozenset[int] = frozenset(),
    on_disk: frozenset[int] = frozenset(),
) -> StepPlan:
    """What the schedule of a step depends on; the number of micro-batches is filled in per step."""
    streamed = [block for block in model.blocks if block.kind is not BlockKind.UNUSED]
    return StepPlan(
        num_layers=model.num_stages,
        num_micro=1,
        trainable=tuple(block.layout.trainable for block in streamed),
        clip=options.max_grad_norm > 0,
        tied=bool(model.shared),
        additive=model.additive,
        resident=resident,
        on_disk=on_disk,
        saved=options.saved,
        spill=options.spill,
        put_off=options.put_off,
        layer_weight_slots=options.layer_weight_slots,
        layer_gradient_slots=options.layer_gradient_slots,
        waiting_gradient_slots=options.waiting_gradient_slots,
        disk_slots=options.disk_slots,
    )


def check_options(model: BlockModel, options: EngineOptions) -> str:
    """The dtype of waiting gradients, once the options are known to make sense.

    Raises:
        UserError: for the first that does not.
    """
    positive = {
        "micro_batch_rows": options.micro_batch_rows,
        "micro_batch_tokens": options.micro_batch_tokens,
        "loss_chunk_tokens": options.loss_chunk_tokens,
        "layer_weight_slots": options.layer_weight_slots,
        "layer_gradient_slots": options.layer_gradient_slots,
        "waiting_gradient_slots": options.waiting_gradient_slots,
        "disk_slots": options.disk_slots,
        "host_threads": options.host_threads,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise UserError(asked=f"{name}={value}", found="less than 1", change="use at least 1")
    if not 0 <= options.max_grad_norm < math.inf:
        raise UserError(
            asked=f"max_grad_norm={options.max_grad_norm}",
            found="no finite number from 0",
            change="use 0 to turn clipping off",
        )
    if options.spill is not None:
        _check_spill(step_plan(model, options), options.spill)
    gradient_dtype = options.gradient_dtype or model.compute_dtype
    if model.compute_dtype == "float32" and gradient_dtype != "float32":
        raise UserError(
            asked=f"gradient_dtype={gradient_dtype} with dtype=float32",
            found="gradients that would be coarser than the computation",
            change="leave gradient_dtype out, or train with dtype=bfloat16",
        )
    return gradient_dtype


def _check_spill(plan: StepPlan, spill: Spill) -> None:
    """Inputs that wait for a backward that does not read them would never be freed."""
    read = range(max(plan.lowest_trainable, 1), plan.head)
    unread = sorted(spill.blocks - (frozenset(read) - plan.saved))
    if unread:
        raise UserError(
            asked=f"spill of the inputs of blocks {', '.join(map(str, unread))}",
            found="no backward that reads them",
            change="spill layers that are neither saved nor below all that is trained",
        )


def padding_of(model: BlockModel, options: EngineOptions) -> Padding:
    """Shapes that micro-batches are padded to: few if layers are compiled for each of them."""
    if options.compile_backend is None or model.random:
        return NO_PADDING
    return Padding(
        length_multiple=options.length_multiple,
        max_length=model.learned_positions,
        round_rows=True,
    )


def split_of(options: EngineOptions, num_rows: int, *, alone: bool) -> tuple[int, int | None]:
    """Rows of a micro-batch, and padded tokens where these decide.

    Args:
        options: `micro_batch_tokens` goes before `micro_batch_rows`.
        num_rows: of the step.
        alone: one row at a time.
    """
    if alone:
        return 1, None
    return options.micro_batch_rows or num_rows, options.micro_batch_tokens


def largest_shape(
    model: BlockModel, options: EngineOptions, *, num_rows: int, longest: int
) -> tuple[int, int, int]:
    """(B, T, micro-batches): no step has a larger micro-batch or more of them.

    Args:
        model: with dropout its rows run one by one.
        options: how a step is split.
        num_rows: of a step.
        longest: tokens of the longest row.
    """
    length = padding_of(model, options).length(longest)
    rows, tokens = split_of(options, num_rows, alone=model.random)
    if tokens is None:
        return min(rows, num_rows), length, math.ceil(num_rows / rows)
    fewest = max(1, tokens // length)  # of the longest rows; of shorter ones more fit
    return math.ceil(tokens / length), length, math.ceil(num_rows / fewest)


def with_tokens_of_a_step(
    model: BlockModel, options: EngineOptions, *, num_rows: int, longest: int
) -> EngineOptions:
    """The same split, with `micro_batch_tokens` no larger than a whole step can be."""
    if options.micro_batch_tokens is None:
        return options
    tokens = num_rows * padding_of(model, options).length(longest)
    return replace(options, micro_batch_tokens=min(options.micro_batch_tokens, tokens))
