"""A GGUF file as transformers reads it, one weight at a time.

Names, layouts and the config are transformers' own (`modeling_gguf_pytorch_utils`); the numbers are
dequantised to fp32 by the `gguf` package.  Promise: the file is memory-mapped, a weight is read
when it is asked for.  A file of which transformers would leave something out is refused by name:
what is trained must be the model in the file.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.utils.import_utils import is_gguf_available

from megatrain.errors import UserError

CONVERT = "give a directory with safetensors weights of this model"
ROPE_FACTORS = "rope_freqs.weight"
GIVE_ROPE = f"{CONVERT}, or its rope_parameters in config_overrides"


def open_reader(path: Path) -> Any:
    """Map the file into memory and read its header.

    Raises:
        UserError: if the package `gguf` is not there, or this is no complete GGUF file.
    """
    check_package(path)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(
            asked=f"the GGUF file {path}",
            found=f"a file that cannot be read as GGUF ({error})",
            change="give a complete .gguf file",
        ) from error
    parts = reader.get_field("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise UserError(
            asked=f"the GGUF file {path}",
            found=f"one of {int(parts.contents())} parts",
            change="join them with llama.cpp's llama-gguf-split --merge",
        )
    return reader


def check_package(path: Path | str) -> None:
    """Check that GGUF files can be read at all.

    Raises:
        UserError: if the package `gguf` is missing or too old.
    """
    if not is_gguf_available():
        raise UserError(
            asked=f"the GGUF file {path}",
            found="the Python package gguf missing or too old",
            change="install it: pip install 'megatrain[gguf]'",
        )


class GgufSource:
    """The weights of a GGUF file under the names that they have in the model."""

    def __init__(self, path: Path, hf_model: Any) -> None:
        reader = open_reader(path)
        self.path = path
        self.architecture = str(reader.get_field("general.architecture").contents())
        try:
            processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)
            self._processor = processor(config=hf_model.config.to_dict())
            self._names = get_gguf_hf_weights_map(hf_model, self._processor)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UserError(
                asked=f"the GGUF file {path}",
                found=f"architecture '{self.architecture}', whose weights cannot be read one by one"
                f" ({error})",
                change=CONVERT,
            ) from error
        scaled = _check_rope(reader, hf_model.config, path)
        self._tensors: dict[str, list[Any]] = {}
        self._unknown: list[str] = []
        for tensor in reader.tensors:
            name = self._names.get(tensor.name) or self._names.get(_stem(tensor.name))
            if name is not None:
                self._tensors.setdefault(name, []).append(tensor)
            elif not (tensor.name == ROPE_FACTORS and (scaled or bool((tensor.data == 1).all()))):
                self._unknown.append(tensor.name)

    def names(self) -> list[str]:
        return list(self._tensors) + self._unknown

    def dtype(self, key: str) -> torch.dtype | None:
        return torch.float32

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[key][0].shape))

    def read(self, key: str) -> Tensor:
        from gguf import dequantize

        parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for tensor in self._tensors[key]:
            result = self._processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping=self._names,
                parsed_parameters=parsed,
            )
            if result.name is not None:  # otherwise the processor has placed it
                parsed["tensors"][key] = torch.from_numpy(np.array(result.weights, copy=True))
        if list(parsed["tensors"]) != [key]:
            raise UserError(
                asked=f"{key} of the GGUF file {self.path}",
                found=f"architecture '{self.architecture}', of which transformers makes"
                f" {', '.join(parsed['tensors']) or 'nothing'} instead",
                change=CONVERT,
            )
        return parsed["tensors"][key]

    def conversions(self, hf_model: Any) -> list[Any]:
        return []  # names and layouts are the model's already

    def check_complete(self, missing: list[str], unexpected: list[str]) -> None:
        """Every weight has a place and every place its weight.

        Raises:
            UserError: otherwise.
        """
        for names, what in ((missing, "no weights for"), (unexpected, "no place in the model for")):
            if names:
                raise UserError(
                    asked=f"the GGUF file {self.path} (architecture '{self.architecture}')",
                    found=f"{what} {', '.join(names[:3])}"
                    + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                    change=GIVE_ROPE if ROPE_FACTORS in names else CONVERT,
                )


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _check_rope(reader: Any, config: Any, path: Path) -> bool:
    """Whether the config scales rope; transformers does not take that from these files.

    Raises:
        UserError: if the file says so and the config does not.
    """
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    scaled = bool(rope.get("rope_type", "default") != "default")
    for name, header_field in reader.fields.items():
        kind = str(header_field.contents()) if name.endswith("rope.scaling.type") else "none"
        if kind != "none" and not scaled:
            raise UserError(
                asked=f"the GGUF file {path}",
                found=f"rope scaling '{kind}', which transformers does not read from it",
                change=GIVE_ROPE,
            )
    return scaled
