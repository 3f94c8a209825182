"""Tiny checkpoints in the published quantised layouts, and what they mean, from the definitions.

Nothing here uses transformers' dequantisation: bytes are made and read with numpy alone.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .harness import reference_model

# OCP Microscaling v1.0, FP4 E2M1: one sign bit, two of exponent, one of mantissa.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def save_reference(config: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A plain checkpoint in the layout that transformers publishes, and its tensors."""
    model = reference_model(config)
    model.save_pretrained(folder, **options)
    return model, load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor], quantisation: dict[str, Any]) -> None:
    """Put these tensors and this quantization_config in place of the plain ones."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": quantisation}))


def to_mxfp4(
    tensors: dict[str, Tensor], seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts as gpt-oss has them: random bytes and exponents, and the numbers that they are."""
    random = np.random.default_rng(seed)
    stored, meaning = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meaning[name] = tensor.to(torch.bfloat16)
            continue
        experts, columns, rows = tensor.shape
        blocks = random.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = random.integers(100, 135, blocks.shape[:-1], dtype=np.uint8)
        stored[f"{name}_blocks"] = torch.from_numpy(blocks)
        stored[f"{name}_scales"] = torch.from_numpy(scales)
        nibbles = np.stack([blocks % 16, blocks // 16], axis=-1)  # the lower half comes first
        magnitudes = np.array(E2M1, dtype=np.float64)[nibbles % 8]
        values = np.where(nibbles >= 8, -magnitudes, magnitudes)
        values = values * 2.0 ** (scales.astype(np.float64)[..., None, None] - 127)
        plain = values.reshape(experts, rows, columns).astype(np.float32)
        meaning[name] = torch.from_numpy(np.ascontiguousarray(plain.transpose(0, 2, 1)))
    return stored, meaning


def to_fp8(
    tensors: dict[str, Tensor], block: tuple[int, int] | None, skip: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """2-D weights as fp8 with a scale for each block; the rest in bf16."""
    stored, meaning = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(part in name for part in skip):
            keep = tensor.dtype if "e_score" in name else torch.bfloat16
            stored[name] = meaning[name] = tensor.to(keep)
            continue
        rows, columns = tensor.shape
        height, width = block or (rows, columns)
        scales = torch.empty(-(-rows // height), -(-columns // width))
        quantised = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        plain = torch.empty_like(tensor)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                area = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scales[i, j] = tensor[area].abs().max() / 448
                quantised[area] = (tensor[area] / scales[i, j]).to(torch.float8_e4m3fn)
                plain[area] = quantised[area].float() * scales[i, j]
        stored[name] = quantised
        stored[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        meaning[name] = plain
    return stored, meaning
