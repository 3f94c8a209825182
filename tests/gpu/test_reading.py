"""Models that are only read, on a real GPU: streamed layers give what resident ones give."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.engine import Query
from megatrain.engine.device import DEVICE_RESERVE
from megatrain.evaluation.generation import Decoding, Generator
from megatrain.opening import ModelChoice, OpenModel
from tests.tokenizers_for_tests import save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

# Layers of 50 MB in fp32: their copies take longer than their computation.
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
PROMPTS = [list(range(5, 60)), list(range(90, 97))]
SMALL_BUDGET = DEVICE_RESERVE + 300 * 2**20
"""Of which 70 % are for weights: two slots and some of the layers."""


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    save_tiny_model(tmp_path / "wide", **WIDE)
    return str(tmp_path / "wide")


def opened(folder: str, gpu_memory: int | None, stack: ExitStack) -> tuple[OpenModel, Any]:
    choice = ModelChoice(path=folder, device="cuda", dtype="float32", gpu_memory=gpu_memory)
    model = OpenModel(choice, to="test")
    return model, stack.enter_context(model.weights())


@pytest.mark.parametrize("gpu_memory", [None, SMALL_BUDGET])
def test_text_is_that_of_transformers_on_the_gpu(folder: str, gpu_memory: int | None) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    with ExitStack() as stack:
        model, store = opened(folder, gpu_memory, stack)
        assert (len(store.resident) < len(store.layouts)) == (gpu_memory is not None)
        whole = stack.enter_context(model.whole(store))
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device="cuda")
            with torch.no_grad():
                expected = reference(ids).logits
            with whole() as hf_model:
                for _ in range(20):  # a copy that comes too late or too early would show
                    assert torch.allclose(hf_model(ids).logits, expected, rtol=0, atol=1e-5)
                generator = Generator(hf_model, model.tokenizer, Decoding(max_new_tokens=40))
                (found,) = generator.complete([prompt])
            text = reference.generate(ids, do_sample=False, max_new_tokens=40)
            assert found.token_ids == text[0, len(prompt) :].tolist()


def test_answers_do_not_depend_on_where_weights_live(folder: str) -> None:
    ids = np.arange(3, 200)
    query = Query(input_ids=ids[:-1], positions=np.arange(len(ids) - 1), targets=ids[1:])
    answers = []
    for gpu_memory in (None, SMALL_BUDGET):
        with ExitStack() as stack:
            model, store = opened(folder, gpu_memory, stack)
            engine = stack.enter_context(model.engine(store, micro_batch_rows=1))
            answers.append(engine.answer([query] * 3)[2].log_probabilities)
    np.testing.assert_allclose(*answers, atol=1e-5)
