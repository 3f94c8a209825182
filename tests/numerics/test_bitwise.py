"""Where the order of operations is the same, gradients are plain autograd's bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.engine import EngineOptions

from .harness import ADAMW, gradients_of, make_config, make_engine, make_rows, reference_model


class WholeRow:
    """Cross-entropy over a whole row at once, as transformers computes it."""

    whole_logits = True

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "gpt2", "llama_tied"])
def test_gradients_equal_plain_autograd_bit_for_bit(name: str) -> None:
    config = make_config(name)
    model: Any = reference_model(config)
    # Tied: plain autograd adds head and embed row by row, the engine all heads, then all embeds.
    tied = bool(config.tie_word_embeddings)
    rows = make_rows(1 if tied else 3)
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    options = EngineOptions(adamw=ADAMW, micro_batch_rows=1, host_threads=1)
    engine = make_engine(config, masters, options=options, loss=WholeRow())
    result = engine.step(rows, learning_rate=1e-3)
    total = float(sum(row.weights[1:].sum(dtype=float) for row in rows))
    loss_sum = 0.0
    for row in rows:
        ids = torch.from_numpy(row.input_ids)[None]
        labels = torch.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        weights = torch.zeros(ids.shape)
        weights[:, :-1] = torch.from_numpy(row.weights)[1:]
        logits = model(input_ids=ids, use_cache=False).logits
        loss = WholeRow()(logits, labels, weights)
        (loss / total).backward()
        loss_sum += float(loss.detach())
    assert result.loss == loss_sum / total
    found = gradients_of(engine)
    for parameter, param in model.named_parameters():
        assert torch.equal(found[parameter], param.grad), parameter
