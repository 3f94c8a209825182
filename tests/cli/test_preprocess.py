"""`megatrain preprocess`: counts, lengths and targets, as they will be trained on."""

from pathlib import Path

import pytest
from rich.text import Text

from megatrain.config import make_config
from megatrain.data import Row
from megatrain.errors import UserError
from megatrain.trainer.preprocess import SUPERVISED, coloured, preprocess
from tests.tokenizers_for_tests import byte_tokenizer

from .test_commands import GOOD, ROOT, run

PAIRS = GOOD | {
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
}


def test_counts_lengths_and_a_row(workspace: Path) -> None:
    result = run("preprocess", str(ROOT / "examples" / "chat.yaml"), "--sample", "5")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["records", "60"] in lines and ["rows", "60"] in lines
    assert "row 5; what is supervised is green" in result.stdout
    assert any("█" in line for line in result.stdout.splitlines())
    assert "!<|im_end|>" in result.stdout


def test_what_is_coloured_is_what_is_supervised(workspace: Path) -> None:
    config, _ = make_config(PAIRS)
    shown = [part for part in preprocess(config, 0) if isinstance(part, Text)]
    (text,) = shown
    green = "".join(
        text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED
    )
    assert green == " 1<|endoftext|>" and text.plain == "0+1? 1<|endoftext|>"


def test_the_first_token_is_no_target() -> None:
    import numpy as np

    row = Row(input_ids=np.array([65, 66, 67]), weights=np.ones(3, np.float32))
    text = coloured(row, byte_tokenizer())
    assert [span.style == SUPERVISED for span in text.spans] == [False, True]


def test_a_row_that_is_not_there_is_one_error(workspace: Path) -> None:
    config, _ = make_config(PAIRS)
    with pytest.raises(UserError, match="sample 24: 24 rows"):
        list(preprocess(config, 24))
