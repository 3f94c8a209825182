"""Every line of docs/models.md: `make test` tries a part of the types, `make test-models` all."""

import os
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .matrix import Kind, outcome

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
RECORDED = dict(re.findall(r"^\| (\S+) \| (exact|refused|not run) \|", PAGE, flags=re.MULTILINE))
SAME_VERSION = f"transformers {transformers.__version__} " in PAGE
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# One or two of each manner of building a model, and what people train most.
SUBSET = (
    "llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma3", "gemma4_text", "phi3", "olmo2",
    "granite", "cohere2", "glm4", "smollm3", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "bart",
    "roformer", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next",
    "minimax", "mamba2", "jamba", "lfm2", "rwkv", "zaya", "hy_v4", "zamba2", "gemma3n_text",
    "inkling2_text", "mllama", "xlm",
)  # fmt: skip
SHARD, NUM_SHARDS = map(int, os.environ.get("SHARD", "1/1").split("/"))


def check(model_type: str) -> None:
    found = outcome(model_type)
    if SAME_VERSION:
        assert found.kind == RECORDED[model_type], found.reason


@pytest.mark.parametrize("model_type", SUBSET)
def test_types_of_every_manner(model_type: str) -> None:
    check(model_type)


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", TYPES[SHARD - 1 :: NUM_SHARDS])
def test_every_type(model_type: str) -> None:
    check(model_type)


@pytest.mark.skipif(not SAME_VERSION, reason="docs/models.md is of another transformers")
def test_the_page_has_every_type_and_nine_of_ten_are_exact() -> None:
    assert list(RECORDED) == TYPES
    kinds = list(RECORDED.values())
    run = [kind for kind in kinds if kind != Kind.NOT_RUN]
    assert kinds.count(Kind.EXACT) >= 0.9 * len(run)
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert f"{kinds.count(Kind.EXACT)} of its {len(run)} types" in readme
