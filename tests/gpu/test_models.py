"""Models of every manner on a real GPU against plain PyTorch there; run with `make test-gpu`."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.matrix import Kind, outcome

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

TYPES = (
    "qwen3", "mistral", "gemma3_text", "gemma4_text", "phi3", "olmo2", "opt", "bloom", "gpt_neox",
    "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "jamba", "lfm2", "zaya",
)  # fmt: skip


@pytest.mark.parametrize(
    "model_type", [name for name in TYPES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
)
def test_exact_on_the_gpu(model_type: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert outcome(model_type, "cuda").kind is Kind.EXACT
