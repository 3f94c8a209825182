"""A Hugging Face model whose parameters take no memory and whose buffers are real.

Parameters go to the meta device as they are registered; buffers (`inv_freq`,
`e_score_correction_bias`) are computed by the model's own constructor and stay real, because
nothing else could reproduce them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.errors import UserError
from megatrain.models.gguf import CONVERT, check_package
from megatrain.models.overrides import override_config
from megatrain.models.quantised import without_quantisation
from megatrain.models.sinks import FAMILIES, FUSED_SINKS, offer_attention_with_sinks

BY_ITSELF = ("grouped_mm", "eager")
"""What transformers writes into a config as `experts_implementation`, with experts or without."""
DISPATCHED = "is_transposed"
"""An attribute that transformers gives all experts that its implementations compute."""
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def read_config(
    path: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    gguf_file: str | None = None,
) -> Any:
    """Read a model's `config.json` and check that it is a causal LM that transformers knows.

    It is the config of a plain model, also where the weights are stored quantised.

    Args:
        path: the model's directory.
        overrides: values to change; see `override_config`.
        gguf_file: name of a GGUF file in the directory, whose header is read instead.

    Raises:
        UserError: if there is no readable config, it is no causal language model, a value cannot be
            changed, or the weights are quantised in a way that cannot be read.
    """
    asked = f"model_name_or_path={path}"
    if gguf_file is not None:
        check_package(gguf_file)
        asked = f"the GGUF file {gguf_file} of {path}"
    try:
        if gguf_file is not None:  # its header is read once: that takes seconds
            stored, _ = PreTrainedConfig.get_config_dict(str(path), gguf_file=gguf_file)
            config = CONFIG_MAPPING[stored["model_type"]].from_dict(stored)
        else:
            config = AutoConfig.from_pretrained(str(path))
            stored, _ = PreTrainedConfig.get_config_dict(str(path))
    except (OSError, ValueError, KeyError, ArithmeticError, StrictDataclassError) as error:
        found = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            asked=asked,
            found=f"no usable {'config.json' if gguf_file is None else 'header'} ({found})",
            change="give a directory that holds a Hugging Face model, or a model id"
            if gguf_file is None
            else CONVERT,
        ) from error
    if "dynamic" in rope_types(config):
        raise UserError(
            asked=asked,
            found="dynamic RoPE scaling, whose frequencies depend on the rows before",
            change="use another rope_type (config_overrides: {rope_parameters: {rope_type: ...}})",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            asked=asked,
            found=f"model type '{config.model_type}', which has no causal language model",
            change="choose a decoder-only causal language model",
        )
    return without_quantisation(override_config(config, stored, overrides or {}), asked=asked)


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model: itself, or a nested one."""
    return config.get_text_config(decoder=True)


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

    Raises:
        UserError: if the config's values make no model, or choose what the model does not have.
    """
    if getattr(config, "output_router_logits", False):
        raise UserError(
            asked=f"train model type '{config.model_type}' with output_router_logits=true",
            found="router auxiliary losses, which need every layer's router at once",
            change="set config_overrides: {output_router_logits: false}",
        )
    offer_attention_with_sinks()
    try:
        with no_init_weights(), _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=COMPUTE_DTYPES[compute_dtype])
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise misconfigured(config, error) from error
    empty = [name for name, param in model.named_parameters() if param.numel() == 0]
    if empty:
        raise misconfigured(config, ValueError(f"{empty[0]} would have no elements"))
    _check_choices(config, model)
    _keep_buffers_in_fp32(model)
    model.tie_weights()
    stray = [name for name, tensor in model.named_buffers() if tensor.is_meta]
    assert not stray, f"buffers on meta: {stray}"
    return model.train()


def misconfigured(config: Any, error: Exception) -> UserError:
    """The error for a config whose values do not make a model that runs."""
    return UserError(
        asked=f"build model type '{config.model_type}' as its config says",
        found=" ".join(str(error).split()).rstrip("."),
        change="look at config_overrides, attn_implementation and the model's config.json",
    )


def _keep_buffers_in_fp32(model: PreTrainedModel) -> None:
    """What `from_pretrained` keeps in fp32; `from_config` of transformers 5.17 rounds buffers."""
    kept = [re.compile(pattern) for pattern in model._keep_in_fp32_modules_strict or ()]
    for name, buffer in model.named_buffers():
        if any(pattern.search(name) for pattern in kept):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer.float()


def _check_choices(config: Any, model: PreTrainedModel) -> None:
    """Refuse what was chosen for attention or experts that the model does not have."""
    attention, experts = config._attn_implementation, config._experts_implementation
    dispatched = any(DISPATCHED in module.__dict__ for module in model.modules())
    found = None
    if attention == FUSED_SINKS and config.model_type not in FAMILIES:
        asked, found = f"attn_implementation: {attention}", f"it is for {', '.join(FAMILIES)}"
    elif attention == FUSED_SINKS and config.attention_dropout:
        asked = f"attn_implementation: {attention}"
        found = f"attention_dropout: {config.attention_dropout}, which it does not have"
    elif experts not in (None, *BY_ITSELF) and not dispatched:
        asked = f"experts_implementation: {experts}"
        found = "no experts that can be computed in several ways"
    if found:
        asked += f" of model type '{config.model_type}'"
        raise UserError(asked=asked, found=found, change="leave it out")


def rope_types(config: Any) -> set[str]:
    """Kinds of RoPE scaling; some models have one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [found, *(value for value in found.values() if isinstance(value, dict))]
    return {str(parameters.get("rope_type")) for parameters in each}
