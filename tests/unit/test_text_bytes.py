"""Bytes of supervised text, counted by hand."""

from pathlib import Path

import numpy as np
import pytest

from megatrain.data import Row, load_rows, supervised_bytes
from megatrain.data.formats import DataOptions
from tests.tokenizers_for_tests import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = 256


def row(text: str, weights: list[float] | None = None) -> Row:
    ids = TOKENIZER(text)["input_ids"]
    given = np.ones(len(ids)) if weights is None else np.asarray(weights)
    return Row(input_ids=np.asarray(ids), weights=given.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "weights", "expected"),
    [
        ("hello", None, 4),  # nothing predicts the first token
        ("hello<|im_end|>", None, 4),  # a special token has no bytes
        ("hello", [0, 0, 1, 1, 0], 2),
        ("hello", [0, 2, 2, 0.5, 0], 4.5),
        ("aé€", None, 5),  # one token a byte: é has 2, € has 3
        ("aé", [0, 1, 0], 0),  # é is complete with its second token only
        ("aé", [0, 0, 1], 2),
        ("aé", [0, 1, 1], 2),
    ],
)
def test_counted_by_hand(text: str, weights: list[float] | None, expected: float) -> None:
    assert supervised_bytes([row(text, weights)], TOKENIZER) == expected


def test_a_long_text_loses_the_first_token_of_each_row_only(tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog; " * 5
    (tmp_path / "a.txt").write_text(text)
    rows = load_rows(tmp_path / "a.txt", TOKENIZER, DataOptions(max_length=50))
    assert supervised_bytes(rows, TOKENIZER) == len(text) - len(rows)


def test_the_completion_counts_and_not_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "What? ", "completion": "Naïve."}')
    rows = load_rows(tmp_path / "a.jsonl", TOKENIZER, DataOptions())
    assert supervised_bytes(rows, TOKENIZER) == len("Naïve.".encode())
    assert rows[0].input_ids[-1] == EOS and rows[0].weights[-1] == 1
