"""Which models keep the samples of a packed row apart: docs/data.md lists those that do not."""

import re
from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.models.packing_proof import prove_packing

from .matrix import _first_that_runs
from .test_matrix import NUM_SHARDS, RECORDED, SAME_VERSION, SHARD

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "data.md").read_text().split())
(LIST,) = re.findall(r"cannot be packed: ([^.]+)\.", PAGE)
REFUSED = frozenset(re.findall(r"[\w-]+", LIST))
EXACT = [model_type for model_type, outcome in RECORDED.items() if outcome == "exact"]
SUBSET = ("llama", "qwen3", "gpt_oss", "bert", "lfm2_moe", "qwen3_5", "rwkv", "bloom", "jamba")


def check(model_type: str) -> None:
    config, why = _first_that_runs(model_type)
    assert config is not None, why
    if model_type in REFUSED:
        with pytest.raises(UserError, match=f"packing: true with model type '{model_type}'"):
            prove_packing(config)
    else:
        prove_packing(config)


@pytest.mark.skipif(not SAME_VERSION, reason="docs/models.md is of another transformers")
@pytest.mark.parametrize("model_type", SUBSET)
def test_types_of_every_manner(model_type: str) -> None:
    check(model_type)


@pytest.mark.matrix
@pytest.mark.skipif(not SAME_VERSION, reason="docs/models.md is of another transformers")
@pytest.mark.parametrize("model_type", EXACT[SHARD - 1 :: NUM_SHARDS])
def test_every_type(model_type: str) -> None:
    check(model_type)


def test_the_numbers_on_the_page() -> None:
    assert set(EXACT) >= REFUSED
    counts = f"{len(EXACT) - len(REFUSED)} of {len(EXACT)}"
    assert counts in PAGE
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert counts in readme
