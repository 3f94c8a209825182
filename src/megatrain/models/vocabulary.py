"""More rows in embedding and output head, as transformers' `resize_token_embeddings` adds them.

Promise: old rows keep their bits; new ones are drawn by transformers' own code, around the mean of
the old ones, so that added tokens do not move the probabilities of the others.  Reproducible from
the seed.  Nothing ever shrinks.  Price: while the embedding loads, three copies of it in fp32.
"""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import UserError
from megatrain.models.blocks import BlockModel
from megatrain.models.build import text_config


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Tokens that the model's embedding has a row for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])


def rows_needed(rows: int, num_tokens: int, multiple_of: int | None) -> int:
    """Rows for `num_tokens` tokens, not fewer than there are, rounded up if asked."""
    step = multiple_of or 1
    return -(-max(rows, num_tokens) // step) * step


def with_rows(config: Any, rows: int) -> Any:
    """A copy of the config with another vocabulary size."""
    larger = copy.deepcopy(config)
    text_config(larger).vocab_size = rows
    return larger


def check_growth(small: PreTrainedModel, large: PreTrainedModel) -> None:
    """Check that embedding and head, and nothing else, grow with the vocabulary.

    Args:
        small: built from the config as it is; parameters on meta.
        large: built from that of `with_rows`.

    Raises:
        UserError: if anything else depends on the vocabulary's size.
    """
    text = text_config(small.config).to_dict()
    for key, value in text.items():
        if "vocab" in key and key != "vocab_size" and isinstance(value, int) and value:
            raise _refuse(small, f"its config has another vocabulary, {key}={value}")
    rows, more = vocabulary_rows(small), text_config(small.config).vocab_size
    if rows != more:
        raise _refuse(small, f"its embedding has {rows} rows where vocab_size is {more}")
    may_grow = _embedding_and_head(small)
    after = _tensors(large)
    for name, tensor in _tensors(small).items():
        grown = (vocabulary_rows(large), *tensor.shape[1:])
        if after[name].shape != (grown if name in may_grow else tensor.shape):
            raise _refuse(small, f"the size of {name} does not follow the embedding's")


def _refuse(model: PreTrainedModel, found: str) -> UserError:
    return UserError(
        asked=f"add tokens to model type '{model.config.model_type}'",
        found=found,
        change="use tokens that the tokenizer has in reserve",
    )


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _embedding_and_head(model: PreTrainedModel) -> set[str]:
    """Names of the parameters with a row or an entry for each token."""
    head = model.get_output_embeddings()
    modules = [model.get_input_embeddings(), *([] if head is None else [head])]
    wanted = {id(param) for module in modules for param in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if id(param) in wanted}


def grow_blocks(
    stored: BlockModel,
    model: BlockModel,
    source: Iterator[tuple[int, dict[str, Tensor]]],
    *,
    seed: int,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Blocks of the stored model as those of the larger one.

    Args:
        stored: the model as the checkpoint holds it; its buffers are copied.
        model: the same with more rows.
        source: (block index, tensors by full name) of `stored`.
        seed: key of the new rows.
    """
    shapes = {p.name: p.shape for block in model.blocks for p in block.layout.params}
    for index, tensors in source:
        if index == 0:
            for name, buffer in model.hf_model.named_buffers():
                buffer.copy_(stored.hf_model.get_buffer(name))
        key = int(np.random.SeedSequence([seed, index, 1]).generate_state(1, np.uint64)[0] >> 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            grown = {
                name: tensor
                if tuple(tensor.shape) == shapes[name]
                else _grow(model.hf_model, tensor, shapes[name][0])
                for name, tensor in tensors.items()
            }
        yield index, grown


def _grow(hf_model: PreTrainedModel, old: Tensor, rows: int) -> Tensor:
    """A weight (rows, D) or a bias (rows) in fp32, with new rows drawn by transformers."""
    grown = torch.empty((rows, *old.shape[1:]))
    grown[: len(old)] = old
    added = rows - len(old)
    before, after = grown[: len(old)], grown
    if old.dim() == 1:
        hf_model._init_added_lm_head_bias_with_mean(
            SimpleNamespace(bias=before), SimpleNamespace(bias=after), added
        )
    else:
        hf_model._init_added_embeddings_weights_with_mean(
            SimpleNamespace(weight=before), SimpleNamespace(weight=after), len(old), added
        )
    return grown
