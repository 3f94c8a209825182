"""Names, shapes and dtypes in our files are those of transformers' own `save_pretrained`.

Whatever reads Hugging Face models (vLLM, converters) goes by these, and by config.json.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from megatrain.checkpoint import save_model
from megatrain.models.parts import join_blocks
from tests.numerics.harness import SMALL, make_config, make_engine, reference_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = ["llama_tied", "llama", "mixtral", "gemma2", "gemma3", "gpt_oss", "gpt2"]
INDEX = "model.safetensors.index.json"


def config_of(family: str) -> Any:
    more: dict[str, dict[str, Any]] = {
        "gemma3": {"head_dim": 8},
        "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    if family not in more:
        return make_config(family)
    model_type = "gemma3_text" if family == "gemma3" else family
    return AutoConfig.for_model(model_type, **SMALL, **more[family])


def stored(folder: Path) -> dict[str, dict[str, tuple[list[int], str]]]:
    """Shape and dtype by name, by file; each file says that it is of torch."""
    found: dict[str, dict[str, tuple[list[int], str]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}, path
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found[path.name] = {n: (s.get_shape(), s.get_dtype()) for n, s in slices.items()}
    return found


def all_of(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of all files together; no name is in two."""
    together = {name: at for tensors in files.values() for name, at in tensors.items()}
    assert len(together) == sum(map(len, files.values()))
    return together


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_model_is_stored_as_transformers_stores_it(
    family: str, dtype: str, shard_bytes: int, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    reference = reference_model(config_of(family))
    masters = {name: param.detach().clone() for name, param in reference.named_parameters()}
    engine = make_engine(
        config_of(family),
        masters,
        compute_dtype="bfloat16" if dtype == "bfloat16" else "float32",
        expert_parts=2 if family in ("mixtral", "gpt_oss") else None,
    )
    save_model(
        engine.model,
        lambda block: join_blocks(engine.model, engine.store.masters, block),
        ours,
        dtype=dtype,
        max_shard_bytes=shard_bytes,
    )
    reference.to(DTYPES[dtype]).save_pretrained(theirs, max_shard_size=shard_bytes)
    files = stored(ours)
    assert all_of(files) == all_of(stored(theirs))
    assert (len(files) > 1) == (shard_bytes == 20_000) == (ours / INDEX).exists()
    if len(files) > 1:
        index, expected = (json.loads((at / INDEX).read_text()) for at in (ours, theirs))
        place = {name: file for file, tensors in files.items() for name in tensors}
        assert index["weight_map"] == place
        assert place.keys() == expected["weight_map"].keys()
        assert index["metadata"]["total_size"] == expected["metadata"]["total_size"]
    config, expected = (json.loads((at / "config.json").read_text()) for at in (ours, theirs))
    assert config == expected
