"""`megatrain eval` on several data sets, against sums made by hand over transformers' loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.cli.arguments import with_option_names
from megatrain.data import tokenise
from megatrain.errors import UserError


def lines_of(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_line_for_each_and_the_total(workspace: Path) -> None:
    text, chat = lines_of("models/base", "data/text"), lines_of("models/base", "data/chat.jsonl")
    first, second, total = lines_of("models/base", "data/text", "data/chat.jsonl")
    assert ([first], [second]) == (text, chat)
    assert (first["file"], second["file"], total["files"]) == ("data/text", "data/chat.jsonl", 2)
    for name in ("supervised_tokens", "supervised_bytes"):
        assert total[name] == first[name] + second[name]
    nats = sum(each["loss"] * each["supervised_tokens"] for each in (first, second))
    assert total["loss"] == pytest.approx(nats / total["supervised_tokens"], rel=1e-9)
    assert total["perplexity"] == pytest.approx(math.exp(total["loss"]))
    bits = nats / math.log(2) / total["supervised_bytes"]
    assert total["bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def test_bits_per_byte_by_hand(workspace: Path) -> None:
    text = "Ünïcode, and a quick fox."
    (workspace / "data" / "one.txt").write_text(text)
    (found,) = lines_of("models/base", "data/one.txt")
    model = AutoModelForCausalLM.from_pretrained("models/base").eval()
    ids = [*AutoTokenizer.from_pretrained("models/base")(text)["input_ids"], 256]
    with torch.no_grad():
        loss = float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    # Ü has two tokens; the first is predicted by nothing, the second completes it.  The last token
    # ends the sequence: its loss counts, its text has no bytes.
    nbytes = len(text.encode())
    assert (found["supervised_tokens"], found["supervised_bytes"]) == (nbytes, nbytes)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)


def test_tokens_without_a_text_have_no_bytes(workspace: Path) -> None:
    (workspace / "data" / "tokens.jsonl").write_text('{"input_ids": [5, 6, 7, 8]}')
    tokens, text, total = lines_of("models/base", "data/tokens.jsonl", "data/text")
    assert tokens["bits_per_byte"] is tokens["supervised_bytes"] is None
    assert text["bits_per_byte"] > 0
    assert total["bits_per_byte"] is total["supervised_bytes"] is None


def test_the_batch_size_changes_nothing(workspace: Path) -> None:
    (one,) = lines_of("models/base", "data/train.jsonl", "--prompt-column", "question",
                      "--completion-column", "answer", "--batch-size", "1")  # fmt: skip
    (many,) = lines_of("models/base", "data/train.jsonl", "--prompt-column", "question",
                       "--completion-column", "answer", "--batch-size", "64")  # fmt: skip
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-5)


def test_a_missing_file_is_told_before_the_model_is_read(workspace: Path) -> None:
    with pytest.raises(UserError, match=r"data/absent\.txt"):
        lines_of("models/base", "data/text", "data/absent.txt")


def test_rows_are_tokenised_once(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lines_of("models/base", "data/text", "--dataset-cache-dir", "kept")
    assert len(list(Path("kept").glob("*/manifest.json"))) == 1

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(tokenise.Task, "batch", never)
    assert lines_of("models/base", "data/text", "--dataset-cache-dir", "kept") == first
    with pytest.raises(AssertionError):
        lines_of("models/base", "data/text")


def test_errors_name_options(workspace: Path) -> None:
    with pytest.raises(UserError, match="set --dataset-text-field, or --prompt-column"):
        lines_of("models/base", "data/train.jsonl")


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("the columns, max_length and the", "the columns, --max-length and the"),
        ("set only_loss: false", "set --no-only-loss"),
        ("only_loss: true, max_length: 4", "--only-loss, --max-length 4"),
        ("device: cuda", "--device cuda"),
        ("another device (its max_length_of)", "another device (its max_length_of)"),
        ("data.max_length 'max_length' --max_length", "data.max_length 'max_length' --max_length"),
        ("model: no such", "model: no such"),
    ],
)
def test_a_key_becomes_the_option_that_set_it(key: str, option: str) -> None:
    def command(
        model: str, max_length: int = 2, only_loss: bool = True, device: str = "cpu"
    ) -> None:
        raise UserError(asked=model, found="nothing", change="nothing")

    with pytest.raises(UserError) as caught:
        with_option_names(command)(key)
    assert caught.value.asked == option
