"""Quantised safetensors checkpoints, turned into plain tensors one at a time.

MXFP4 (gpt-oss) and fine-grained FP8 (DeepSeek-V3, Qwen3-FP8) are read; every other quantisation is
refused by name.  Promise: a weight is the product of the stored number and its scale, exact (MXFP4,
in bf16) or rounded once to fp32 (FP8).  The model that is trained and saved is a plain one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatrain.errors import UserError

READ_HERE = "MXFP4 of gpt-oss, FP8 with weight_scale_inv, and GGUF files can be read"


class StorageFormat(Protocol):
    """How stored tensors make up a plain one."""

    @property
    def dtype(self) -> torch.dtype:
        """Of a dequantised tensor."""

    def group(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Stored keys by the name of the plain tensor that they make up."""

    def shape(self, *stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the plain tensor, from the shapes of its stored ones."""

    def decode(self, name: str, *stored: Tensor) -> Tensor:
        """The plain tensor."""


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """`x` (float8_e4m3fn) and `x_scale_inv`, one scale for each block of rows and columns.

    The blocks at the end of rows and columns may be smaller (DeepSeek-V3's 576-row projection).
    transformers derives the block from the shape of the scales and refuses or misreads these.
    """

    block: tuple[int, int] | None
    """Rows and columns; None: one scale for the whole tensor."""
    dtype: torch.dtype = torch.float32

    def group(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        stored = set(keys)
        scales = {f"{key}_scale_inv" for key in stored} & stored
        return {
            key: (key, f"{key}_scale_inv") if f"{key}_scale_inv" in scales else (key,)
            for key in sorted(stored - scales)
            if not key.endswith(".activation_scale")  # of activations at inference, not of weights
        }

    def shape(self, *stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[0]

    def decode(self, name: str, *stored: Tensor) -> Tensor:
        weight, scale = stored
        rows, columns = weight.shape[-2:] if weight.dim() > 1 else (1, weight.numel())
        block = self.block or (rows, columns)
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        expected = (*weight.shape[:-2], *grid)
        single = scale.numel() == 1 and expected.count(1) == len(expected)
        if weight.dtype is not torch.float8_e4m3fn or not (single or scale.shape == expected):
            raise UserError(
                asked=f"the FP8 weight {name}",
                found=f"{weight.dtype} {tuple(weight.shape)} with scales {tuple(scale.shape)}, not"
                f" {expected} as blocks of {block} need",
                change="give the unquantised checkpoint",
            )
        plain = weight.to(torch.float32)
        per_block = scale.to(torch.float32).reshape(expected)
        for row in range(grid[0]):  # in place: no second tensor of this size
            stripe = plain[..., row * block[0] : (row + 1) * block[0], :]
            factors = per_block[..., row, :].repeat_interleave(block[1], dim=-1)
            stripe *= factors[..., :columns].unsqueeze(-2)
        return plain


@dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """gpt-oss experts: `x_blocks` (experts, rows, groups, 16 bytes) and `x_scales`, one a group.

    A byte holds two 4-bit floats, the lower half first; a scale is an exponent of two plus 127
    (OCP Microscaling v1.0).  The plain tensor is transposed: (experts, columns, rows).
    """

    dtype: torch.dtype = torch.bfloat16

    def group(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        stored = set(keys)
        packed = {
            key.removesuffix("_blocks")
            for key in stored
            if key.endswith("_blocks") and f"{key.removesuffix('_blocks')}_scales" in stored
        }
        groups: dict[str, tuple[str, ...]] = {x: (f"{x}_blocks", f"{x}_scales") for x in packed}
        used = {key for pair in groups.values() for key in pair}
        groups.update({key: (key,) for key in stored - used})
        return dict(sorted(groups.items()))

    def shape(self, *stored: tuple[int, ...]) -> tuple[int, ...]:
        if len(stored) == 1 or len(stored[0]) != 4:
            return stored[0]
        experts, rows, groups, nbytes = stored[0]
        return (experts, groups * nbytes * 2, rows)

    def decode(self, name: str, *stored: Tensor) -> Tensor:
        blocks, scales = stored
        bytes_only = blocks.dtype is torch.uint8 and scales.dtype is torch.uint8
        if not bytes_only or blocks.dim() != 4 or blocks.shape[:-1] != scales.shape:
            raise UserError(
                asked=f"the MXFP4 weight {name}",
                found=f"blocks {blocks.dtype} {tuple(blocks.shape)} with scales {scales.dtype}"
                f" {tuple(scales.shape)}",
                change="give a checkpoint in the layout that gpt-oss was published in",
            )
        plain = torch.empty(self.shape(blocks.shape, scales.shape), dtype=self.dtype)
        for expert in range(len(plain)):  # transformers' indices take four times the room
            one = slice(expert, expert + 1)
            plain[one] = convert_moe_packed_tensors(blocks[one], scales[one], dtype=self.dtype)
        return plain


def find_quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` in a `config.json`, its own or that of its text model."""
    found = config.get("quantization_config")
    if found is None:
        found = (config.get("text_config") or {}).get("quantization_config")
    return found


def storage_format(config: Mapping[str, Any], *, asked: str) -> StorageFormat | None:
    """How the weights beside this `config.json` are stored; None if plainly.

    Raises:
        UserError: for a quantisation that cannot be read.
    """
    found = find_quantisation(config)
    if found is None:
        return None
    method = _method_name(found)
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return Mxfp4()
    if method == "fp8" and found.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        block = found.get("weight_block_size")
        if block is None:
            return Fp8(block=None)
        if isinstance(block, (list, tuple)) and len(block) == 2:
            return Fp8(block=(int(block[0]), int(block[1])))
    raise UserError(
        asked=asked,
        found=f"weights quantised with {method}"
        + (f" in a '{config.get('model_type')}'" if method in ("mxfp4", "fp8") else ""),
        change=f"give the unquantised model that they were made from ({READ_HERE})",
    )


def _method_name(quantisation: Mapping[str, Any]) -> str:
    if quantisation.get("load_in_4bit") or quantisation.get("load_in_8bit"):
        return "bitsandbytes"  # old configs do not name it
    return str(quantisation.get("quant_method", "an unnamed method"))


def without_quantisation(config: Any, *, asked: str) -> Any:
    """The config of the plain model that the dequantised weights make up, in place.

    Raises:
        UserError: for a quantisation that cannot be read.
    """
    storage_format(config.to_dict(), asked=asked)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config
