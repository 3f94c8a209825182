"""Log-probabilities of tokens equal those of transformers' own logits, however rows are split."""

import numpy as np
import pytest
import torch

from megatrain.engine import EngineOptions, Query
from tests.numerics.harness import VOCAB, make_config, make_engine, reference_model

LENGTHS = [9, 3, 16, 1, 12]


def queries() -> list[Query]:
    random = np.random.default_rng(0)
    return [
        Query(
            input_ids=random.integers(3, VOCAB, length),
            # Several tokens at one place, and places out of order.
            positions=np.array([length - 1, 0, length - 1, length // 2]),
            targets=random.integers(3, VOCAB, 4),
        )
        for length in LENGTHS
    ]


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "mixtral", "gpt2"])
@pytest.mark.parametrize(("rows", "chunk"), [(None, None), (2, 3)])
def test_answers_are_those_of_the_logits(family: str, rows: int | None, chunk: int | None) -> None:
    config = make_config(family)
    reference = reference_model(config)
    masters = {name: param.detach().clone() for name, param in reference.named_parameters()}
    options = EngineOptions(debug=True, micro_batch_rows=rows, loss_chunk_tokens=chunk)
    engine = make_engine(config, masters, options=options)
    asked = queries()
    for query, answer in zip(asked, engine.answer(asked), strict=True):
        with torch.no_grad():
            logits = reference.eval()(torch.from_numpy(query.input_ids)[None]).logits[0]
        expected = logits.log_softmax(-1)[query.positions, query.targets]
        np.testing.assert_allclose(answer.log_probabilities, expected, atol=2e-5)
        likeliest = logits.argmax(-1)[query.positions].numpy() == query.targets
        np.testing.assert_array_equal(answer.likeliest, likeliest)


def test_the_likeliest_token_is_said_to_be() -> None:
    config = make_config("llama")
    reference = reference_model(config).eval()
    masters = {name: param.detach().clone() for name, param in reference.named_parameters()}
    engine = make_engine(config, masters, options=EngineOptions())
    ids = np.arange(3, 12)
    with torch.no_grad():
        best = reference(torch.from_numpy(ids)[None]).logits[0].argmax(-1).numpy()
    targets = best.copy()
    targets[4] = (targets[4] + 1) % VOCAB
    (answer,) = engine.answer([Query(input_ids=ids, positions=np.arange(9), targets=targets)])
    assert answer.likeliest.tolist() == [place != 4 for place in range(9)]
