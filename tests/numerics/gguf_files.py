"""Tiny GGUF files as llama.cpp's converter writes them, and what their bytes mean.

Names and layouts are llama.cpp's (convert_hf_to_gguf.py); the block formats are ggml's.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

Type = gguf.GGMLQuantizationType

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
KINDS = {
    "attn_q": Type.Q8_0,
    "ffn_down": Type.Q4_0,
    "ffn_down_exps": Type.Q4_0,
    "attn_v": Type.F16,
    "token_embd": Type.Q8_0,
}


def _largest(blocks: np.ndarray) -> np.ndarray:
    """Of each block; one for the padding token's, which are zero."""
    found = np.abs(blocks).max(-1, keepdims=True)
    return np.where(found == 0, 1.0, found)


def q8_0(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32 along a row: an fp16 scale and 32 signed bytes.  Bytes, and what they mean."""
    blocks = values.reshape(*values.shape[:-1], -1, 32).astype(np.float32)
    scale = (_largest(blocks) / 127).astype(np.float16)
    numbers = np.rint(blocks / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], axis=-1)
    meaning = numbers.astype(np.float32) * scale.astype(np.float32)
    return data.reshape(*values.shape[:-1], -1), meaning.reshape(values.shape)


def q4_0(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32: an fp16 scale and 16 bytes; the lower halves are the first 16 numbers, + 8."""
    blocks = values.reshape(*values.shape[:-1], -1, 32).astype(np.float32)
    scale = (_largest(blocks) / 7).astype(np.float16)
    numbers = np.rint(blocks / scale.astype(np.float32)).clip(-8, 7) + 8
    packed = numbers[..., :16].astype(np.uint8) | (numbers[..., 16:].astype(np.uint8) << 4)
    data = np.concatenate([scale.view(np.uint8), packed], axis=-1)
    meaning = ((numbers - 8) * scale.astype(np.float32)).astype(np.float32)
    return data.reshape(*values.shape[:-1], -1), meaning.reshape(values.shape)


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from halves (Hugging Face) to pairs (ggml), as llama.cpp's LlamaModel."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{IN_A_LAYER[stem]}.{suffix}"


def parts_of(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A model's tensor as GGUF tensors: the fused experts are two."""
    if name.endswith("experts.gate_up_proj"):
        layer, (gate, up) = name.split(".")[2], tensor.chunk(2, dim=1)
        return [(f"blk.{layer}.ffn_{n}_exps.weight", t) for n, t in (("gate", gate), ("up", up))]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", tensor)]
    return [(gguf_name(name), tensor)]


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    header: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
    merges: list[str] | None = None,
) -> dict[str, Tensor]:
    """Write the model's weights; returns what the file's bytes mean, by the model's own names."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    for key, value in (header or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    _add_tokens(writer, tokens or [f"t{i}" for i in range(config.vocab_size)], merges or [])
    meaning: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        pieces = []
        for full_name, part in parts_of(name, param.detach()):
            values, heads = part.numpy(), 0
            if architecture == "llama" and ".attn_q." in full_name:
                heads = config.num_attention_heads
            if architecture == "llama" and ".attn_k." in full_name:
                heads = config.num_key_value_heads
            stored = permuted(values, heads) if heads else values
            plain = _add_tensor(writer, full_name, np.ascontiguousarray(stored))
            pieces.append(torch.from_numpy(unpermuted(plain, heads) if heads else plain))
        meaning[name] = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


def _add_tokens(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> np.ndarray:
    """Store a tensor in the kind of its name; returns what is stored."""
    stem = name.removesuffix(".weight").split(".")[-1]
    kind = KINDS.get(stem, Type.F32) if values.ndim > 1 else Type.F32
    if kind is Type.F32:
        writer.add_tensor(name, values)
        return values.copy()
    if kind is Type.F16:
        writer.add_tensor(name, values.astype(np.float16))
        return values.astype(np.float16).astype(np.float32)
    data, meaning = q8_0(values) if kind is Type.Q8_0 else q4_0(values)
    writer.add_tensor(name, data, raw_dtype=kind)
    return meaning
