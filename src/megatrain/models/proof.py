"""Proof on a tiny instance that a model's blocks compute what the model computes.

The checks in `split` see arguments; they cannot see a layer that keeps something to itself for
the next one.  So an architecture that the tests do not cover is tried before it is trusted: a
small model of the same kind is run forward and backward as a whole and block by block, and every
gradient is compared.  Price: a second or two at load, only for architectures not in `TESTED`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megatrain.errors import UserError
from megatrain.models.blocks import BlockModel
from megatrain.models.build import build_on_meta
from megatrain.models.carried import CarriedTensors
from megatrain.models.parts import in_parts
from megatrain.models.passes import backward, forward
from megatrain.models.shrink import small_configs
from megatrain.models.split import split_model

TESTED = frozenset({"llama", "qwen2", "gemma2", "mixtral", "gpt2"})
"""Model types whose every gradient, master and moment the tests compare with plain PyTorch."""

MAX_PARAMS = 300_000_000
"""Largest instance that is tried when only the depth can be reduced."""
TOLERANCE = 1e-4
"""Of the largest gradient of a tensor: fp32 summation order."""
NO_LABEL = -100


def prove(config: Any, *, compute_dtype: str) -> None:
    """Return if blocks of this architecture are exact, at once if the tests cover it.

    Args:
        config: a transformers config.
        compute_dtype: gradients are compared in fp32; for "bfloat16" transformers' own forward is
            tried in it too.

    Raises:
        UserError: if they are not, or no small instance can be built.
    """
    if config.model_type not in TESTED:
        prove_instance(config, compute_dtype=compute_dtype)


def prove_instance(config: Any, *, compute_dtype: str) -> None:
    """As `prove`, whether or not the tests cover the architecture."""
    ids = torch.arange(3, 21).view(2, 9)
    small, model, expected = small_instance(config, [ids])
    _check_causal(small, model, ids)
    no_label = torch.full_like(ids[:, :1], NO_LABEL)
    try:
        first = first_difference(
            blocks_of(small, model), model, expected, ids, torch.cat([ids[:, 1:], no_label], 1)
        )
    except RuntimeError as error:
        reason = f"an architecture without a test that does not run block by block ({error})"
        raise _refusal(config, reason) from error
    if first:
        raise _refusal(
            config,
            "an architecture without a test whose gradients differ when it is run block by"
            f" block (first: {first})",
        )
    if compute_dtype == "bfloat16":
        _check_bfloat16(small, ids)


def prove_parts(config: Any, parts: int) -> None:
    """Return if the experts of this architecture can be streamed in parts, exactly.

    Args:
        config: a transformers config.
        parts: of a layer's experts; the small instance has as many, or as it has experts.

    Raises:
        UserError: if they cannot.
    """
    ids = torch.arange(3, 21).view(2, 9)
    small, model, expected = small_instance(config, [ids])
    blocks = in_parts(blocks_of(small, model), parts)
    no_label = torch.full_like(ids[:, :1], NO_LABEL)
    labels = torch.cat([ids[:, 1:], no_label], 1)
    first = first_difference(blocks, model, expected, ids, labels)
    if first:
        found = f"gradients that differ when its experts are streamed in parts (first: {first})"
        raise _refusal(config, found, "leave expert_parts out, and report this model type")


def small_instance(
    config: Any, batches: Sequence[Tensor], limits: Mapping[str, int] | None = None
) -> tuple[Any, Any, dict[str, Tensor]]:
    """A small config of the same kind, its model in fp32, and the gradients of the whole of it.

    Args:
        config: a transformers config.
        batches: token ids (B, T) of each forward; the loss is the mean over all that is predicted.
        limits: see `small_configs`.

    Raises:
        UserError: if no small instance can be built.
    """
    for small in small_configs(config, limits):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
                model.requires_grad_(True)  # also what the model itself would keep fixed
                if sum(p.numel() for p in model.parameters()) > MAX_PARAMS:
                    continue
                return small, model, _gradients_of_the_whole(model, batches)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            continue  # these sizes do not fit together in this architecture
    raise _refusal(config, "an architecture without a test, of which no small instance was built")


def _refusal(config: Any, found: str, change: str = "report this model type") -> UserError:
    return UserError(asked=f"train model type '{config.model_type}'", found=found, change=change)


def _gradients_of_the_whole(model: Any, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    losses = []
    for ids in batches:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        targets = ids[:, 1:].flatten()
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"))
    loss = torch.stack(losses).sum() / sum(ids[:, 1:].numel() for ids in batches)
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(param) if gradient is None else gradient
        for (name, param), gradient in zip(named.items(), gradients, strict=True)
    }


def _check_causal(config: Any, model: Any, ids: Tensor) -> None:
    """Rows are padded on the right without a mask: nothing may look at later tokens."""
    changed = ids.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        before, after = (model(input_ids=x, use_cache=False).logits for x in (ids, changed))
    if not torch.allclose(before[:, :-1], after[:, :-1], rtol=TOLERANCE, atol=TOLERANCE):
        raise _refusal(
            config,
            "a model whose tokens see later tokens",
            "choose a decoder-only causal language model",
        )


def _check_bfloat16(config: Any, ids: Tensor) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except RuntimeError as error:
        found = f"transformers' own forward fails in bfloat16 ({error})"
        raise _refusal(config, found, "use dtype: float32") from error


def blocks_of(config: Any, model: Any) -> BlockModel:
    """The blocks of a small model, with its buffers and without dropout."""
    blocks = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    for name, buffer in blocks.hf_model.named_buffers():
        buffer.copy_(model.get_buffer(name))
    blocks.train(False)
    return blocks


def first_difference(
    blocks: BlockModel,
    model: Any,
    expected: Mapping[str, Tensor],
    ids: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
) -> str:
    """Name of the first parameter whose gradient by blocks is not the expected one, or "".

    Args:
        blocks: see `blocks_of`.
        model: whose parameters they are.
        expected: gradients by name.
        ids, labels: (B, T); what is predicted at each token.
        positions: (B, T) of packed rows.
    """
    params = {name: param.detach() for name, param in model.named_parameters()}
    found = _gradients_by_blocks(blocks, params, ids, labels, positions)
    floor = TOLERANCE * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), floor)
        difference = float((found[name] - gradient).abs().max())
        if not difference <= TOLERANCE * scale:
            return name
    return ""


def _gradients_by_blocks(
    blocks: BlockModel,
    params: Mapping[str, Tensor],
    ids: Tensor,
    labels: Tensor,
    positions: Tensor | None,
) -> dict[str, Tensor]:
    """Forward with inputs kept, then one block after the other recomputed and run backward."""
    of_block = [blocks.cut(block.index, params) for block in blocks.blocks]
    sums = {name: torch.zeros_like(param) for name, param in params.items()}
    carried = CarriedTensors()
    with torch.no_grad():
        embedded, calls, written = blocks.prologue(of_block[0], ids, positions)
    carried.add(0, written)
    inputs = [embedded]
    calls = [calls[blocks.layer_of(stage)] for stage in range(blocks.num_stages)]
    for block, call in enumerate(calls, start=1):
        y, written = forward(
            partial(blocks.layer, block - 1),
            of_block[block],
            inputs[-1],
            call,
            carried.before(block, blocks.reads(block - 1)),
        )
        carried.add(block, written)
        inputs.append(y)
    hidden = inputs.pop().requires_grad_(True)
    head = of_block[blocks.head.index] | {name: of_block[0][name] for name in blocks.shared}
    head = {name: param.clone().requires_grad_(True) for name, param in head.items()}
    logits = torch.stack([blocks.epilogue(head, row) for row in hidden])
    F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL
    ).backward()
    for name, param in head.items():
        sums[name] += 0 if param.grad is None else param.grad
    gradient = hidden.grad

    for block in reversed(range(blocks.num_stages + 1)):
        assert gradient is not None
        outgoing = {"": gradient} | carried.take_gradients(block)
        keys = blocks.reads(block - 1) if block else None
        gradient, read = backward(
            partial(blocks.layer, block - 1) if block else blocks.embedding,
            of_block[block],
            inputs[block - 1] if block else ids,
            calls[block - 1] if block else positions,
            carried.before(block, keys),
            carried.differentiable(block, 0, keys),
            outgoing,
            blocks.cut(block, sums),
            block > 0,
        )
        carried.add_gradients(block, read)
    return sums
