"""Some rows of a micro-batch, cut out of it, give what they give in it, whatever the model is."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine.recovery import joined
from megatrain.models.row_share import RowShare
from tests.numerics.harness import assert_close, gradients_of, make_engine, make_rows
from tests.numerics.harness import reference_model as whole
from tests.numerics.test_out_of_memory import OPTIONS, Small

from .matrix import LEARNING_RATE, TOLERANCE
from .tiny import tiny_configs

# What layers are given beside their input: something of their own, a router's state, a choice of
# tokens, positions for all rows; and recurrences.
TYPES = (
    "gemma4_text",
    "zaya",
    "hy_v4",
    "glm_moe_dsa",
    "roformer",
    "mamba2",
    "qwen3_next",
)


@pytest.mark.parametrize("model_type", TYPES)
def test_pieces_of_a_micro_batch(model_type: str) -> None:
    config: Any = next(tiny_configs(model_type))
    masters = {name: param.detach().clone() for name, param in whole(config).named_parameters()}
    options = replace(OPTIONS, micro_batch_rows=4, debug=False)
    expected, engine = (make_engine(config, masters, options=options) for _ in range(2))
    small = Small(engine, rows=1, tokens=3)
    results = [each.step(make_rows(4), learning_rate=LEARNING_RATE) for each in (expected, engine)]
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    assert_close(gradients_of(engine), gradients_of(expected), relative=TOLERANCE, what="gradient")
    assert small.refused["layer"] and small.refused["embedding"]


def test_gradients_of_what_rows_share_are_summed_and_others_joined() -> None:
    def share(rows: range, shape: tuple[int, ...]) -> RowShare:
        given = {"prologue/0": torch.empty(shape)}
        return RowShare(rows=rows, of=3, positions_BT=None, calls=[], prologue=given)

    def gradient(whole: Tensor, *parts: Tensor | None) -> Tensor | None:
        one = whole.shape[0] != 3
        shares = [
            share(rows, whole.shape if one else (len(rows), 2)) for rows in (range(1), range(1, 3))
        ]
        return joined(shares, whole, "prologue/0", parts)

    ones = torch.ones
    assert gradient(ones(3, 2), None, None) is None
    assert torch.equal(gradient(ones(1, 2), ones(1, 2), None), ones(1, 2))
    assert torch.equal(gradient(ones(1, 2), ones(1, 2), 2 * ones(1, 2)), 3 * ones(1, 2))
    found = gradient(ones(3, 2), None, 2 * ones(2, 2))
    assert torch.equal(found, torch.tensor([[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]))
