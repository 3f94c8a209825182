"""Changes to a model's config before the model is built.

Promise: a key that this config does not have is an error, never a silent attribute.  The config
is read anew with the changes in it, so that what it derives from them (layer types, head size)
follows, and it is saved with the model as Hugging Face saves it.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from megatrain.errors import UserError
from megatrain.models.sinks import FAMILIES, FUSED_SINKS

NOT_HERE = {
    "model_type": "the weights belong to one model type",
    "dtype": "use the key dtype",
    "torch_dtype": "use the key dtype",
    "rope_theta": "use rope_parameters: {rope_theta: ...}",
}
"""Keys that are refused where the config does not have them as its own, or whatever it has."""
ALWAYS_REFUSED = ("model_type", "dtype", "torch_dtype")
ROPE = "rope_parameters"
ROPE_KEPT = ("rope_theta", "partial_rotary_factor")
"""What another kind of RoPE scaling does not change; transformers would take its defaults."""
NO_SCALING = {"rope_type": "default"}
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keys that are no part of a config's values, and not saved with it."""
ATTENTION = ("eager", "sdpa", FUSED_SINKS)
EXPERTS = ("grouped_mm", "batched_mm", "eager")


def override_config(config: Any, stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """The config with some values changed.

    A key that only the text config of a vision-language model has is changed there; one that both
    have is changed in both.  `rope_parameters` (or `rope_scaling`, its older name) without a
    `rope_type` changes the values given; with one it replaces all but `rope_theta` and
    `partial_rotary_factor`.  Fewer `num_hidden_layers` cut lists of one entry a layer.

    Args:
        config: as transformers read it.
        stored: the same as it stands in `config.json`.
        overrides: new values by key; `IMPLEMENTATIONS` are keys too.

    Raises:
        UserError: for a key that the config does not have, or a value that does not fit.
    """
    attention = overrides.get("attn_implementation")
    experts = overrides.get("experts_implementation")
    changes = {key: value for key, value in overrides.items() if key not in IMPLEMENTATIONS}
    for key, chosen, ways in zip(
        IMPLEMENTATIONS, (attention, experts), (ATTENTION, EXPERTS), strict=True
    ):
        if chosen not in (None, *ways):
            raise UserError(
                asked=f"config_overrides: {key}: {chosen}",
                found="no such way here to compute it",
                change=f"use {', '.join(ways[:-1])} or {ways[-1]}",
            )
    if changes:
        values = _changed(config, stored, changes)
        try:
            config = type(config).from_dict(values)
        except (StrictDataclassError, ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise UserError(
                asked=f"config_overrides: {dict(changes)}",
                found=" ".join(str(error).split()).rstrip("."),
                change="give values that fit each other and the model",
            ) from error
    if attention is None and config.model_type in FAMILIES and not config.attention_dropout:
        attention = FUSED_SINKS
    if attention is not None:
        config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    return config


def _changed(config: Any, stored: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` would be with the changes in it."""
    values = dict(stored)
    known = _known_keys(config)
    text_name = _text_config_name(config)
    for key, value in changes.items():
        name = _canonical(config, key)
        in_text = text_name is not None and key in _known_keys(getattr(config, text_name))
        if key in ALWAYS_REFUSED or not (name in known or in_text):
            raise _unknown(config, key)
        if in_text:
            assert text_name is not None
            inner = values.get(text_name) or {}
            values[text_name] = _changed(getattr(config, text_name), inner, {key: value})
        if name in known:
            _set(config, values, name, value)
    return values


def _set(config: Any, values: dict[str, Any], name: str, value: Any) -> None:
    """Change one value under its canonical name; a sub-config is changed key by key."""
    current = getattr(config, name, None)
    if isinstance(current, PreTrainedConfig) and isinstance(value, Mapping):
        values[name] = _changed(current, values.get(name) or {}, value)
        return
    if name == ROPE:
        value = _rope(current or {}, value or NO_SCALING)
    for key in [key for key in values if _canonical(config, key) == name]:
        del values[key]
    values[name] = value
    if name == _canonical(config, "num_hidden_layers"):
        for key, listed in values.items():
            if isinstance(listed, list) and len(listed) == current and isinstance(value, int):
                values[key] = listed[:value]


def _rope(current: Mapping[str, Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(
            asked=f"config_overrides: {ROPE}: {value}",
            found="no mapping",
            change=f"write {ROPE}: {{rope_type: ..., factor: ...}}",
        )
    if any(isinstance(each, Mapping) for each in current.values()):  # one for each layer type
        if not set(value) <= set(current):
            raise UserError(
                asked=f"config_overrides: {ROPE}: {dict(value)}",
                found=f"a model with RoPE parameters for each of {', '.join(current)}",
                change=f"write {ROPE}: {{{next(iter(current))}: {{...}}}}",
            )
        return {**current, **{key: _rope(current[key] or {}, new) for key, new in value.items()}}
    if "rope_type" not in value and "type" not in value:
        return {**current, **value}
    return {key: current[key] for key in ROPE_KEPT if key in current} | dict(value)


def _known_keys(config: Any) -> set[str]:
    known = set(config.to_dict()) | set(config.attribute_map)
    return known | {"rope_scaling"} if ROPE in known else known


def _canonical(config: Any, key: str) -> str:
    if key == "rope_scaling":
        return ROPE
    canonical: str = config.attribute_map.get(key, key)
    return canonical


def _text_config_name(config: Any) -> str | None:
    """The attribute that holds the text config, if the config is not itself one."""
    text = config.get_text_config(decoder=True)
    return next((name for name in config.sub_configs if getattr(config, name) is text), None)


def _unknown(config: Any, key: str) -> UserError:
    text = config.get_text_config(decoder=True)
    every = sorted(_known_keys(config) | _known_keys(text))
    nearest = difflib.get_close_matches(key, every, n=1)
    change = f"did you mean '{nearest[0]}'" if nearest else "see the model's config.json"
    return UserError(
        asked=f"config_overrides: key '{key}'",
        found=f"no such key of model type '{config.model_type}'"
        if key not in ALWAYS_REFUSED
        else "not a key to override",
        change=NOT_HERE.get(key, change),
    )
