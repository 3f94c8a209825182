"""The transformers model itself, with weights that are there only while a layer runs.

Its forward, its cache and its `generate` are transformers' own, whatever the architecture: only the
layers are replaced, by stand-ins that ask for a layer's weights and then run that very layer.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationConfig
from transformers.generation.streamers import TextStreamer

from megatrain.models.blocks import BlockModel
from megatrain.models.recorder import LayerCall, recorders_in

LayerWeights = Callable[[int], Mapping[str, Tensor]]
"""A block's parameters by full name, on the compute device, until the next but one is asked for."""


@contextmanager
def whole_model(
    model: BlockModel, outside: Mapping[str, Tensor], layer_weights: LayerWeights
) -> Iterator[Any]:
    """The model, ready to be called, for the duration of the context; no gradients.

    Args:
        model: its blocks.
        outside: every parameter outside the layers, by full name, on the compute device.
        layer_weights: asked for each layer's block, in forward order, just before it runs.
    """
    layers = list(model.container.children())

    def run(index: int, hidden: Tensor, call: LayerCall) -> Any:
        prefix = model.layer_prefix(index)
        weights = layer_weights(index + 1)
        local = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        args, kwargs = call.bind(hidden, {})
        return functional_call(layers[index], local, args, kwargs)

    model.train(False)
    with _parameters(model, outside), recorders_in(model.container, run), torch.no_grad():
        yield model.hf_model


@contextmanager
def _parameters(model: BlockModel, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Real parameters in place of those on meta; tied names share one."""
    params = {name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()}
    params |= {alias: params[owner] for alias, owner in model.tied.items() if owner in params}
    before: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    try:
        for name, param in params.items():
            place, _, leaf = name.rpartition(".")
            module = model.hf_model.get_submodule(place)
            before.append((module, leaf, module._parameters[leaf]))
            module._parameters[leaf] = param
        yield
    finally:
        for module, leaf, meta in before:
            module._parameters[leaf] = meta


def generation_config(model: BlockModel) -> Any:
    """How its makers generate: `generation_config.json`, else what the model's config says."""
    if model.generation_config is None:
        return model.hf_model.generation_config
    return GenerationConfig.from_dict(json.loads(model.generation_config))


class TextWriter(TextStreamer):
    """Hands over text as soon as it is complete, without the prompt and special tokens."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers."""
        del stream_end
        self._write(text)
