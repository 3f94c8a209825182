"""The tensors of a checkpoint by name, plain, none of them read before it is asked for.

Promise: opening reads headers only; `read` returns one tensor, dequantised if it is stored so.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from megatrain.errors import UserError
from megatrain.models.quantised import READ_HERE, StorageFormat, storage_format

GENERATION_CONFIG = "generation_config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""safetensors' names of what can be a plain weight."""


class Source(Protocol):
    """Where weights come from."""

    def names(self) -> list[str]:
        """Names of all tensors."""

    def dtype(self, key: str) -> torch.dtype | None:
        """What `read` will return; None if it is no plain weight."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of what `read` will return."""

    def read(self, key: str) -> Tensor:
        """One tensor."""

    def conversions(self, hf_model: Any) -> list[Any]:
        """transformers' renamings and conversions from these names to the model's, new objects."""

    def check_complete(self, missing: list[str], unexpected: list[str]) -> None:
        """Raise UserError if this kind of checkpoint must not lack or have these."""


class SafetensorsSource:
    """safetensors files, quantised or not."""

    def __init__(self, files: list[Path], storage: StorageFormat | None) -> None:
        handles = [_open(file) for file in files]
        self._handles = {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118
        self._storage = storage
        self._stored = (
            {key: (key,) for key in self._handles}
            if storage is None
            else storage.group(self._handles)
        )

    def names(self) -> list[str]:
        return list(self._stored)

    def dtype(self, key: str) -> torch.dtype | None:
        stored = self._stored[key]
        if len(stored) > 1 and self._storage is not None:
            return self._storage.dtype
        return DTYPES.get(self._handles[stored[0]].get_slice(stored[0]).get_dtype())

    def shape(self, key: str) -> tuple[int, ...]:
        shapes = [tuple(self._handles[k].get_slice(k).get_shape()) for k in self._stored[key]]
        return shapes[0] if self._storage is None else self._storage.shape(*shapes)

    def read(self, key: str) -> Tensor:
        stored: list[Tensor] = [self._handles[k].get_tensor(k) for k in self._stored[key]]
        if len(stored) == 1 or self._storage is None:
            return stored[0]
        return self._storage.decode(key, *stored)

    def conversions(self, hf_model: Any) -> list[Any]:
        return list(get_model_conversion_mapping(hf_model))

    def check_complete(self, missing: list[str], unexpected: list[str]) -> None:
        """What does not match is reported, not refused."""


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            asked=f"the weights in {file}",
            found=f"a file that is damaged or incomplete ({error})",
            change="download or copy it again",
        ) from error


class LazyTensor:
    """Stands in a state dict for a tensor that transformers reads when it converts it."""

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, key

    def __getitem__(self, index: Any) -> Tensor:
        assert index is Ellipsis
        return self._source.read(self._key)


def weight_names(path: Path) -> list[str]:
    """Names of the safetensors files that a model directory has or, by its index, should have."""
    index = path / INDEX_NAME
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [SINGLE_NAME]


def checkpoint_files(path: Path) -> list[Path]:
    """The weight files of a model: a GGUF file itself, or the safetensors of a directory.

    Raises:
        UserError: if there are none, or one that the index names is missing.
    """
    if path.suffix == ".gguf":
        return [path]
    files = [path / name for name in weight_names(path)]
    for file in files:
        if not file.is_file():
            raise UserError(
                asked=f"the weights of {path}",
                found=f"no file {file.name}",
                change="give a directory with safetensors weights (convert others with"
                " save_pretrained)",
            )
    return files


def open_source(path: Path, hf_model: Any) -> Source:
    """Open a model directory, or a GGUF file.

    Raises:
        UserError: if there are no weights, or they are stored in a way that cannot be read.
    """
    files = checkpoint_files(path)
    if path.suffix == ".gguf":
        from megatrain.models.gguf import GgufSource

        return GgufSource(path, hf_model)
    config = path / "config.json"
    options = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return SafetensorsSource(files, storage_format(options, asked=f"the weights of {path}"))


def check_plain(source: Source, keys: list[str]) -> None:
    """Check that weights are numbers, not the bytes of a quantisation that nothing names.

    Raises:
        UserError: for the first that is not.
    """
    for key in keys:
        if source.dtype(key) is None:
            raise UserError(
                asked=f"the weight {key}",
                found="quantised or packed numbers without the scales that belong to them",
                change=f"give the unquantised checkpoint ({READ_HERE})",
            )
