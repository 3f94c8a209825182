"""Proof on a tiny instance that a model's blocks compute what the model computes.

The checks in `split` see arguments; they cannot see a layer that keeps something to itself for
the next one.  So an architecture that the tests do not cover is tried before it is trusted: a
small model of the same kind is run forward and backward as a whole and block by block, and every
gradient is compared.  Price: a second or two at load, only for architectures not in `TESTED`.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megatrain.errors import UserError
from megatrain.models.blocks import BlockModel
from megatrain.models.build import build_on_meta
from megatrain.models.split import split_model

TESTED = frozenset({"llama", "qwen2", "gemma2", "mixtral", "gpt2"})
"""Model types whose every gradient, master and moment the tests compare with plain PyTorch."""

# Sizes of the instance; each is set where the config has it and it is larger.  Which of them fit
# together differs between architectures: the attempts below are tried in turn.
SMALL_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
GROUPED_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
LATENT_HEADS = {"num_key_value_heads": 4}
STATE_SPACE = {
    "num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "state_size": 16,
    "mamba_d_state": 16,
}
ATTEMPTS: tuple[dict[str, int], ...] = (
    SMALL_SIZES | GROUPED_HEADS,
    SMALL_SIZES | GROUPED_HEADS | STATE_SPACE,
    SMALL_SIZES | LATENT_HEADS,
    {"vocab_size": 128},
)
NUM_LAYERS = 4
MAX_PARAMS = 300_000_000
"""Largest instance that is tried when only the depth can be reduced."""
TOLERANCE = 1e-4
"""Of the largest gradient of a tensor: fp32 summation order."""


def prove(config: Any) -> None:
    """Return if blocks of this architecture are exact, at once if the tests cover it.

    Raises:
        UserError: if they are not, or no small instance can be built.
    """
    if config.model_type in TESTED:
        return
    for sizes in ATTEMPTS:
        small = shrink(config, sizes)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
                model.requires_grad_(True)  # also what the model itself would keep fixed
                if sum(p.numel() for p in model.parameters()) > MAX_PARAMS:
                    continue
                expected = _gradients_of_the_whole(model)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            continue  # these sizes do not fit together in this architecture
        _check_causal(small, model)
        _compare(small, model, expected)
        return
    raise UserError(
        asked=f"train model type '{config.model_type}'",
        found="an architecture without a test, of which no small instance could be built",
        change="report this model type so that a test can be added",
    )


def shrink(config: Any, sizes: dict[str, int]) -> Any:
    """A copy of the config with few layers and the sizes named made small."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    depth = min(NUM_LAYERS, text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:depth])  # per-layer lists such as layer_types
    text.num_hidden_layers = depth
    for name, size in sizes.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > size:
            setattr(text, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    return small


def _ids() -> Tensor:
    return torch.arange(3, 21).view(2, 9)


def _gradients_of_the_whole(model: Any) -> dict[str, Tensor]:
    ids = _ids()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(param) if gradient is None else gradient
        for (name, param), gradient in zip(named.items(), gradients, strict=True)
    }


def _check_causal(config: Any, model: Any) -> None:
    """Rows are padded on the right without a mask: nothing may look at later tokens."""
    ids = _ids()
    changed = ids.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        before, after = (model(input_ids=x, use_cache=False).logits for x in (ids, changed))
    if not torch.allclose(before[:, :-1], after[:, :-1], rtol=TOLERANCE, atol=TOLERANCE):
        raise UserError(
            asked=f"train model type '{config.model_type}'",
            found="a model whose tokens see later tokens",
            change="choose a decoder-only causal language model",
        )


def _compare(config: Any, model: Any, expected: dict[str, Tensor]) -> None:
    blocks = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    for name, buffer in blocks.hf_model.named_buffers():
        buffer.copy_(model.get_buffer(name))
    blocks.train(False)
    params = {name: param.detach() for name, param in model.named_parameters()}
    try:
        found = _gradients_by_blocks(blocks, params)
    except RuntimeError as error:
        raise UserError(
            asked=f"train model type '{config.model_type}'",
            found=f"an architecture without a test that does not run block by block ({error})",
            change="report this model type so that it can be added",
        ) from error
    floor = TOLERANCE * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), floor)
        difference = float((found.get(name, torch.zeros(())) - gradient).abs().max())
        if not difference <= TOLERANCE * scale:
            raise UserError(
                asked=f"train model type '{config.model_type}'",
                found="an architecture without a test whose gradients differ when it is run"
                f" block by block (first: {name})",
                change="report this model type so that it can be added",
            )


def _gradients_by_blocks(blocks: BlockModel, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Forward with inputs kept, then one block after the other recomputed and run backward."""
    ids = _ids()
    of_block = [
        {p.name: params[p.name].clone().requires_grad_(True) for p in block.layout.params}
        for block in blocks.blocks
    ]
    with torch.no_grad():
        embedded, calls = blocks.prologue(of_block[0], ids)
        inputs = [embedded]
        for index, call in enumerate(calls):
            inputs.append(blocks.layer(index, of_block[index + 1], inputs[-1], call))
    hidden = inputs.pop().requires_grad_(True)
    head = of_block[blocks.head.index] | {name: of_block[0][name] for name in blocks.shared}
    logits = torch.stack([blocks.epilogue(head, row) for row in hidden])
    F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradient = hidden.grad
    for index in reversed(range(blocks.num_layers)):
        x = inputs[index].detach().requires_grad_(True)
        blocks.layer(index, of_block[index + 1], x, calls[index]).backward(gradient)
        gradient = x.grad
    blocks.prologue(of_block[0], ids)[0].backward(gradient)
    return {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for leaves in of_block
        for name, leaf in leaves.items()
    }
