"""A small instance of an architecture: the same kinds of layers, few of them, and narrow."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from megatrain.models.build import text_config

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
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
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
MOST_LAYERS = 8
"""If layers are of more than four kinds."""
TOWER_LAYERS = 2
"""Of a vision or audio tower, which text never enters."""


def small_configs(config: Any, limits: Mapping[str, int] | None = None) -> Iterator[Any]:
    """Small configs of the same type, smallest first; some may not build.

    Args:
        config: a transformers config.
        limits: further largest values by name.
    """
    for sizes in ATTEMPTS:
        try:
            yield shrink(config, sizes | dict(limits or {}))
        except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError):
            continue  # these sizes do not fit together in this architecture


def shrink(config: Any, sizes: dict[str, int]) -> Any:
    """A config of the same type with few layers and the sizes named made small.

    Every kind of layer that per-layer lists tell apart is there, in the original order.

    Args:
        config: a transformers config.
        sizes: largest value by name, one of `ATTEMPTS`.
    """
    raw = copy.deepcopy(config.to_dict())
    text = text_config(config)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(raw.get(name), dict) and part is not None and part is not text:
            _limit(part, raw[name], {"num_hidden_layers": TOWER_LAYERS})
    name = next((n for n in config.sub_configs if getattr(config, n, None) is text), None)
    _shrink_text(text, raw if name is None else raw[name], sizes)
    small = type(config).from_dict(raw)
    small._attn_implementation = config._attn_implementation  # which is no part of the values
    small._experts_implementation = config._experts_implementation
    return small


def _limit(config: Any, raw: dict[str, Any], limits: dict[str, int]) -> None:
    for name, limit in limits.items():
        key = config.attribute_map.get(name, name)
        if isinstance(raw.get(key), int) and raw[key] > limit:
            raw[key] = limit


def _shrink_text(config: Any, raw: dict[str, Any], sizes: dict[str, int]) -> None:
    depth = config.num_hidden_layers
    chosen = _representative_layers(raw, depth)
    for name, value in raw.items():
        if isinstance(value, list) and len(value) == depth:
            raw[name] = [value[index] for index in chosen]
    overrides = {int(index): value for index, value in (raw.get("per_layer_config") or {}).items()}
    if overrides:
        raw["per_layer_config"] = {
            new: {k: min(v, sizes.get(k, v)) for k, v in overrides[old].items()}
            for new, old in enumerate(chosen)
            if old in overrides
        }
    _limit(config, raw, {"num_hidden_layers": len(chosen)})
    _limit(config, raw, {"num_kv_shared_layers": len(chosen) // 2})
    _limit(config, raw, sizes)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if raw.get(name) is not None:
            raw[name] = 0


def _representative_layers(raw: dict[str, Any], depth: int) -> list[int]:
    """Indices of the first layer of each kind, repeated until there are enough."""
    lists = [value for value in raw.values() if isinstance(value, list) and len(value) == depth]
    overrides = {int(index): value for index, value in (raw.get("per_layer_config") or {}).items()}
    first: dict[str, int] = {}
    for index in range(depth):
        first.setdefault(repr([[value[index] for value in lists], overrides.get(index)]), index)
    kinds = list(first.values())[:MOST_LAYERS]
    wanted = min(depth, max(NUM_LAYERS, len(kinds)))
    return [kinds[position % len(kinds)] for position in range(wanted)]
