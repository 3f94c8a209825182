"""Tiny real models, and the plain PyTorch run that the engine must equal.

The reference is Hugging Face's model, `torch.optim.AdamW` and `clip_grad_norm_`, micro-batch by
micro-batch with gradients summed.  Names ending in T are tensors by parameter name.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions, StepResult
from megatrain.engine.microbatch import make_micro_batch, split_rows
from megatrain.engine.options import AdamWOptions
from megatrain.layout import Purpose
from megatrain.memory import BlockStore, DiskTier, segment_views
from megatrain.memory.store import param_views
from megatrain.models import build_on_meta, split_model
from megatrain.models.parts import in_parts, join_blocks
from megatrain.models.selection import Selection
from megatrain.schedule import Spill

VOCAB = 99
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SMALL, "tie_word_embeddings": False}),
    "llama_tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", SMALL),
    "gemma2": ("gemma2", {**SMALL, "head_dim": 8, "final_logit_softcapping": 3.0}),
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt2": ("gpt2", {**GPT2, **NO_DROPOUT}),
    "gpt2_dropout": ("gpt2", GPT2),
}
# Some gradients are zero but for rounding (a key bias under softmax); Adam would turn that noise
# into full steps.  An eps well above the noise keeps the comparison about the arithmetic.
ADAMW = AdamWOptions(beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.1)


def make_config(name: str) -> Any:
    model_type, options = CONFIGS[name]
    return AutoConfig.for_model(model_type, **options)


def make_rows(count: int, seed: int = 0, longest: int = 12) -> list[Row]:
    """Rows of uneven length with an uneven share of supervised tokens."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(generator.integers(4, longest + 1))
        weights = (generator.random(length) < 0.3 + 0.6 * (index % 2)).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        rows.append(Row(input_ids=generator.integers(3, VOCAB, length), weights=weights))
    return rows


def spill_of(blocks: frozenset[int], **extra: int) -> Spill:
    """Inputs of these layers wait on the host; room for rows of `make_rows`, two a micro-batch."""
    input_bytes = 2 * 12 * SMALL["hidden_size"] * 4
    return Spill(blocks=blocks, input_bytes=input_bytes, num_micro=3, **extra)


def reference_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def make_engine(
    config: Any,
    masters: dict[str, Tensor],
    *,
    compute_dtype: str = "float32",
    device: str = "cpu",
    trainable: Sequence[str] = (),
    frozen: Sequence[str] = (),
    resident: frozenset[int] = frozenset(),
    disk: DiskTier | None = None,
    options: EngineOptions | None = None,
    expert_parts: int | None = None,
    **extra: Any,
) -> Engine:
    """An engine whose masters are copies of `masters` (a state dict)."""
    model = split_model(
        build_on_meta(config, compute_dtype=compute_dtype),
        compute_dtype=compute_dtype,
        selection=Selection(trainable=trainable, frozen=frozen),
    )
    if expert_parts is not None:
        model = in_parts(model, expert_parts)
    layouts = [block.layout for block in model.blocks]
    store = BlockStore(layouts, device=torch.device(device), resident=resident, disk=disk)
    for block in model.blocks:
        store.write(block.index, model.cut(block.index, masters))
    chosen = options or EngineOptions(adamw=ADAMW, debug=True, host_threads=1)
    return Engine(model, store, chosen, device=torch.device(device), **extra)


@dataclass(kw_only=True)
class ReferenceStep:
    loss: float
    norm: float
    gradients: dict[str, Tensor]
    """After clipping."""


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


class Reference:
    """Plain PyTorch training of a whole model."""

    def __init__(
        self,
        model: Any,
        *,
        learning_rate: float,
        max_grad_norm: float,
        rows_per_micro: int | None,
        frozen: Collection[str] = (),
        loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """`loss` of logits (B, T, V), labels (B, T), weights (B, T) replaces cross-entropy."""
        self.model, self.max_grad_norm, self.rows_per_micro = model, max_grad_norm, rows_per_micro
        self.loss = loss or weighted_cross_entropy
        patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
        decayed = set(get_parameter_names(model, [nn.LayerNorm], patterns))
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad and name not in frozen)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for n, p in named if (n in decayed) == decay],
                "weight_decay": ADAMW.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=learning_rate,
            betas=(ADAMW.beta1, ADAMW.beta2),
            eps=ADAMW.eps,
            foreach=False,
        )

    def step(self, rows: Sequence[Row]) -> ReferenceStep:
        total = sum(float(row.weights[1:].sum()) for row in rows)
        self.optimizer.zero_grad()
        loss_sum = 0.0
        groups = split_rows(rows, rows_per_micro=self.rows_per_micro, tokens_per_micro=None)
        for group in groups:
            batch = make_micro_batch(group, 0, self.model.device)
            mask = torch.zeros_like(batch.ids_BT)
            for index, row in enumerate(group):
                mask[index, : len(row.input_ids)] = 1
            logits = self.model(
                input_ids=batch.ids_BT, attention_mask=mask, use_cache=False
            ).logits.float()
            loss = self.loss(logits, batch.labels_BT, batch.weights_BT)
            (loss / total).backward()
            loss_sum += float(loss.detach())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for param in trained:  # an expert without tokens has a zero gradient, not none
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        norm = (
            torch.nn.utils.clip_grad_norm_(trained, self.max_grad_norm, foreach=False)
            if self.max_grad_norm > 0
            else torch.stack([p.grad.norm() for p in trained]).norm()
        )
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer.step()
        return ReferenceStep(loss=loss_sum / total, norm=float(norm), gradients=gradients)

    def moments(self, key: str) -> dict[str, Tensor]:
        return {
            name: self.optimizer.state[param][key]
            for name, param in self.model.named_parameters()
            if param.requires_grad
        }


def engine_state(engine: Engine, purpose: Purpose) -> dict[str, Tensor]:
    """Masters (for WEIGHT) or moments by name, after a flush."""
    engine.flush()
    state: dict[str, Tensor] = {}

    def of_block(block: int) -> dict[str, Tensor]:
        if purpose is Purpose.WEIGHT:
            return engine.store.masters(block)
        moments = engine.store.moments(block, purpose)
        return {name: view.cpu().clone() for name, view in moments.items()}

    for block in engine.model.whole.blocks:
        state |= join_blocks(engine.model, of_block, block.index)
    return state


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Rounded gradients as they wait for the update (clipping on), unclipped."""
    found: dict[str, Tensor] = {}
    dtype = engine._worker.gradient_dtype

    def of_block(block: int) -> dict[str, Tensor]:
        layout = engine.model.blocks[block].layout
        if not layout.trainable or block > engine.plan.head:
            return {}
        flat = engine.buffers.home_gradients[block]
        views = param_views(layout, segment_views(layout, Purpose.GRADIENT, flat, dtype))
        return {name: view.cpu().float().clone() for name, view in views.items()}

    for block in engine.model.whole.blocks:
        found |= join_blocks(engine.model, of_block, block.index)
    return found


def assert_close(
    mine: dict[str, Tensor], theirs: dict[str, Tensor], *, relative: float, what: str
) -> None:
    """Every tensor within `relative` of the reference's largest magnitude in that tensor.

    A tensor that is tiny beside the rest (rounding only) is held to 1e-4 of the largest one.
    """
    assert mine.keys() == theirs.keys(), what
    floor = 1e-4 * max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        scale = max(float(tensor.abs().max()), floor)
        difference = float((mine[name] - tensor).abs().max())
        assert difference <= relative * scale, f"{what} {name}: {difference:.3e} of {scale:.3e}"


def assert_steps_equal(
    engine: Engine, reference: Reference, steps: Sequence[Sequence[Row]], *, learning_rate: float
) -> None:
    """Every loss, norm and (clipped) gradient, then moments and masters, to summation order."""
    clip = reference.max_grad_norm
    for rows in steps:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=learning_rate)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-5)
        if clip:  # else gradients are gone: their blocks are updated
            scale = min(1.0, clip / (result.grad_norm + 1e-6))
            mine = {name: each * scale for name, each in gradients_of(engine).items()}
            assert_close(mine, expected.gradients, relative=2e-4, what="gradient")
    for purpose, key in ((Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")):
        assert_close(engine_state(engine, purpose), reference.moments(key), relative=2e-4, what=key)
    masters = {name: param.detach() for name, param in reference.model.named_parameters()}
    assert_close(engine_state(engine, Purpose.WEIGHT), masters, relative=2e-4, what="master")


def run_engine(
    engine: Engine, steps: Sequence[Sequence[Row]], learning_rate: float
) -> list[StepResult]:
    return [engine.step(rows, learning_rate=learning_rate) for rows in steps]


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
