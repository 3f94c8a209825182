"""What training computes and what transformers computes from the written model: bit for bit.

Logits are compared up to a constant of each place, as log-probabilities of every token.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from megatrain.engine import Engine, Query
from megatrain.exporter import export_model
from megatrain.opening import ModelChoice, OpenModel
from tests.tokenizers_for_tests import save_tiny_model

from .runs import trainer
from .test_export import save_tiny_mixtral

VOCAB = 262
IDS = [np.arange(97, 97 + length) for length in (4, 11, 12)]
"""Of several lengths: nothing about one shape makes it right."""
CHECKPOINT = Path("out/checkpoint-4")

KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {},
    "experts": {},
    "frozen": {"frozen": ["model.layers.0.*", "model.embed_tokens.*"]},
}


def save_base(kind: str) -> None:
    folder = Path("models/of_kind")
    if kind == "experts":
        save_tiny_mixtral(folder)
    else:
        save_tiny_model(folder, tie_word_embeddings=kind == "tied")


def query(ids: npt.NDArray[np.int64]) -> Query:
    """After each of its tokens, every token there is."""
    return Query(
        input_ids=ids,
        positions=np.repeat(np.arange(len(ids)), VOCAB),
        targets=np.tile(np.arange(VOCAB), len(ids)),
    )


def answers(engine: Engine) -> list[Tensor]:
    """(T, V) each; a row at a time, as transformers is asked: products of other shapes round
    otherwise.
    """
    found = [engine.answer([query(ids)])[0].log_probabilities for ids in IDS]
    return [torch.from_numpy(each).view(-1, VOCAB) for each in found]


def logits(model: Any) -> list[Tensor]:
    """(T, V) each."""
    with torch.no_grad():
        return [model(torch.from_numpy(ids)[None]).logits[0].float() for ids in IDS]


def of_transformers(folder: Path, dtype: str = "auto") -> list[Tensor]:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())


def normalised(logits_TV: Tensor) -> Tensor:
    return logits_TV - logits_TV.logsumexp(1, keepdim=True)


class AskAtTheEnd(TrainerCallback):
    """Of the very engine that has trained, with its own masters."""

    def __init__(self, made: Any) -> None:
        self._make, self._engines = made._engine, list[Engine]()
        made._engine = self._remember
        self.answers: list[Tensor] = []

    def _remember(self, *args: Any) -> Engine:
        self._engines.append(self._make(*args))
        return self._engines[-1]

    def on_train_end(self, *args: Any, **others: Any) -> None:
        self.answers = answers(self._engines[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_has_the_logits_of_training(kind: str, dtype: str, workspace: Path) -> None:
    save_base(kind)
    made = trainer(
        model_name_or_path="models/of_kind", dtype=dtype, max_steps=4, save_steps=4, **KINDS[kind]
    )
    ask = AskAtTheEnd(made)
    made.add_callback(ask)
    made.train()
    export_model(CHECKPOINT, Path("exported"), dtype=dtype, max_shard_bytes=30_000)
    for folder in (CHECKPOINT, Path("out"), Path("exported")):
        for ours, theirs in zip(ask.answers, of_transformers(folder), strict=True):
            assert torch.equal(ours, normalised(theirs)), folder
    untrained = of_transformers(Path("models/of_kind"), dtype)
    for ours, was in zip(ask.answers, untrained, strict=True):
        assert not torch.equal(ours, normalised(was)), "really trained"


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_model_has_the_logits_that_it_has_when_it_is_read(
    kind: str, workspace: Path
) -> None:
    """In every dtype, by `eval`'s engine and by transformers' forward over streamed layers."""
    save_base(kind)
    changes = {"model_name_or_path": "models/of_kind", "dtype": "bfloat16"} | KINDS[kind]
    trainer(max_steps=4, save_steps=4, **changes).train()
    folders = {"bfloat16": CHECKPOINT}
    for dtype in ("float32", "float16"):
        folders[dtype] = Path(dtype)
        export_model(CHECKPOINT, folders[dtype], dtype=dtype)
    for stored, folder in folders.items():
        computed = "bfloat16" if stored == "bfloat16" else "float32"
        expected = of_transformers(folder, computed)
        opened = OpenModel(ModelChoice(path=str(folder), dtype=computed), to="be compared")
        with opened.weights() as store:
            with opened.engine(store, micro_batch_rows=1) as engine:
                for ours, theirs in zip(answers(engine), expected, strict=True):
                    assert torch.equal(ours, normalised(theirs)), stored
            with opened.whole(store) as whole, whole() as model:
                for ours, theirs in zip(logits(model), expected, strict=True):
                    assert torch.equal(ours, theirs), stored
