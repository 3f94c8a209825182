"""Keys that say which model is trained, and what is changed in it."""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatrain.config.groups.keys import Keys

ATTENTION = ("eager", "sdpa", "fused_sinks")
NO_ATTENTION = {
    "flash_attention_2": "it needs the flash-attn package",
    "flash_attention_3": "it needs the flash-attn package",
    "flex_attention": "not tried with layers that run one by one",
}
"""Attention that transformers has and megatrain does not, and why."""


def _check_attention(value: Any) -> None:
    if value not in ATTENTION:
        why = NO_ATTENTION.get(value, "no such attention here") if isinstance(value, str) else ""
        raise ValueError(
            f"{why or 'not a name'}; use {', '.join(ATTENTION[:-1])} or {ATTENTION[-1]}"
        )


class ModelKeys(Keys):
    """The model, its config and its tokenizer."""

    model_name_or_path: str = Field(description="Directory of a Hugging Face model, or its id.")
    model_revision: str | None = Field(None, description="Revision of a model id.")
    cache_dir: str | None = Field(
        None, description="Where downloaded models are kept; default: HF_HUB_CACHE."
    )
    gguf_file: str | None = Field(
        None,
        description="Name of a GGUF file in that directory or repository, to start from its"
        " dequantised weights; a model_name_or_path that ends in .gguf means the same.",
    )
    model_init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Load the weights, or draw them as the model's own code would."
    )
    tokenizer_name: str | None = Field(
        None,
        description="Directory or id of a model whose tokenizer to use (and to save), if not"
        " model_name_or_path. With model_init: random its begin and end tokens become the model's.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of weights and activations; auto: bfloat16 on a GPU, float32 on the"
        " CPU. Masters and moments are fp32 either way.",
    )
    trainable: list[str] = Field(
        default_factory=list,
        description="Train only what matches: globs over parameter names (*norm*), layers[-4:],"
        " embed, head. The rest costs no optimizer state, and no backward below it.",
    )
    frozen: list[str] = Field(
        default_factory=list, description="Patterns of the same kinds; what matches is not trained."
    )
    attn_implementation: str | None = Field(
        None,
        description="Attention code: eager or sdpa of transformers, or fused_sinks of our own;"
        " default: fused_sinks for gpt_oss and granite_swa, else transformers' choice.",
    )
    expert_parts: int | None = Field(
        None,
        ge=1,
        description="Stream the experts of a mixture in so many blocks a layer, of two experts or"
        " more; default: whole layers unless the GPU is too small for them. Sums differ in their"
        " order, and weights that model_init: random draws, block by block; nothing else.",
    )
    config_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes to the model's config, by its own keys, or as a=1,b=2.",
    )
    add_tokens: list[str] = Field(
        default_factory=list,
        description="Ordinary tokens to add to the tokenizer; the embedding grows if it must.",
    )
    add_special_tokens: list[str] = Field(
        default_factory=list,
        description="The same for special tokens: never split, left out of decoded text.",
    )
    pad_vocab_to_multiple_of: int | None = Field(
        None, ge=1, description="Round the rows of embedding and head up to a multiple of this."
    )

    @field_validator("attn_implementation")
    @classmethod
    def _is_attention_that_is_there(cls, value: str | None) -> str | None:
        if value is not None:
            _check_attention(value)
        return value

    @field_validator("config_overrides")
    @classmethod
    def _has_attention_that_is_there(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "attn_implementation" in value:
            _check_attention(value["attn_implementation"])
        return value

    @field_validator("add_tokens", "add_special_tokens")
    @classmethod
    def _are_tokens(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("a token is not empty")
        return value
