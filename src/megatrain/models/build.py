"""A Hugging Face model whose parameters take no memory and whose buffers are real.

Parameters go to the meta device as they are registered; buffers (`inv_freq`,
`e_score_correction_bias`) are computed by the model's own constructor and stay real, because
nothing else could reproduce them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.errors import UserError

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def read_config(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Read a model's `config.json` and check that it is a causal LM that transformers knows.

    Raises:
        UserError: if there is no readable config, or it is no causal language model.
    """
    asked = f"model_name_or_path={path}"
    try:
        config = AutoConfig.from_pretrained(
            str(path), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        found = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            asked=asked,
            found=f"no usable config.json ({found})",
            change="give a directory that holds a Hugging Face model, or a model id",
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
        raise UserError(
            asked=asked,
            found=f"model type '{config.model_type}', which has no causal language model",
            change="choose a decoder-only causal language model",
        )
    return config


def set_special_tokens(config: Any, *, bos_token_id: int | None, eos_token_id: int | None) -> None:
    """Make a model that is yet to be built begin and end texts as its tokenizer does.

    It gets no padding token: training needs none, and the embedding of one would never be trained.
    """
    text_config = config.get_text_config()
    text_config.bos_token_id, text_config.eos_token_id = bos_token_id, eos_token_id
    text_config.pad_token_id = None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter that a module registers becomes a meta tensor at once."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(
                param.detach().to("meta"), requires_grad=param.requires_grad
            )

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_on_meta(config: Any, *, compute_dtype: str) -> PreTrainedModel:
    """Build the model of `config` in training mode with all parameters on the meta device.

    Args:
        config: a transformers config.
        compute_dtype: "bfloat16" or "float32": the dtype of weights and activations.
    """
    if getattr(config, "output_router_logits", False):
        raise UserError(
            asked=f"train model type '{config.model_type}' with output_router_logits=true",
            found="router auxiliary losses, which need every layer's router at once",
            change="set output_router_logits to false in the model's config.json",
        )
    with no_init_weights(), _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=COMPUTE_DTYPES[compute_dtype])
    model.tie_weights()
    stray = [name for name, tensor in model.named_buffers() if tensor.is_meta]
    assert not stray, f"buffers on meta: {stray}"
    return model.train()
