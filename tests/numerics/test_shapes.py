"""The shipped shapes have as many parameters as their publishers say."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from megatrain.models import build_on_meta, read_config
from megatrain.models.proof import prove

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
ROW = re.compile(r"^\| \[(?P<name>[^\]]+)\][^|]*\|[^|]*\| (?P<total>[^|]+) \| (?P<active>[^|]*)\|")
EXPERTS = re.compile(r"\.experts\.")
WITHOUT_INPUT_EMBEDDING = ("gpt-oss-20b", "gpt-oss-120b", "deepseek-v3")
"""Shapes whose published active count leaves out the input embedding."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A count as published."""

    value: float
    last_digit: float
    """What one unit of its last digit is worth; 0 if the count is exact."""

    @classmethod
    def read(cls, text: str) -> "Published":
        """Read `7,615,616,512` or `12.9B`."""
        if not text.endswith("B"):
            return cls(value=int(text.replace(",", "")), last_digit=0.0)
        digits = text.removesuffix("B")
        decimals = len(digits.partition(".")[2])
        return cls(value=float(digits) * 1e9, last_digit=10.0 ** (9 - decimals))


def table() -> dict[str, tuple[Published, Published | None]]:
    """Shape -> (all parameters, active ones) of the table beside the shapes."""
    rows = filter(None, map(ROW.match, (SHAPES / "README.md").read_text().splitlines()))
    return {
        row["name"]: (
            Published.read(row["total"].strip()),
            Published.read(row["active"].strip()) if row["active"].strip() else None,
        )
        for row in rows
    }


TABLE = table()
FIRST_OF_KIND = {read_config(SHAPES / name).model_type: name for name in reversed(TABLE)}


def build(name: str) -> PreTrainedModel:
    return build_on_meta(read_config(SHAPES / name), compute_dtype="bfloat16")


def num_active(name: str, model: PreTrainedModel) -> float:
    """Parameters that a token meets."""
    config = model.config
    total = 0.0
    for full_name, param in model.named_parameters():
        share = 1.0
        if EXPERTS.search(full_name):  # stacked: the first dimension counts experts
            share = config.num_experts_per_tok / param.shape[0]
        total += share * param.numel()
    if name in WITHOUT_INPUT_EMBEDDING:
        total -= model.get_input_embeddings().weight.numel()
    return total


def test_every_shape_stands_in_the_table() -> None:
    assert sorted(TABLE) == sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


@pytest.mark.parametrize("name", TABLE)
def test_parameters_are_as_many_as_published(name: str) -> None:
    published, active = TABLE[name]
    model = build(name)
    assert type(model).__name__ in model.config.architectures
    count = model.num_parameters()
    assert abs(count - published.value) <= published.last_digit / 2, f"{count:,}"
    if active is not None:  # cards round or cut off
        count_active = num_active(name, model)
        assert abs(count_active - active.value) < active.last_digit, f"{count_active:,}"


@pytest.mark.parametrize("name", FIRST_OF_KIND.values())
def test_every_kind_of_shape_can_be_trained_by_blocks(name: str) -> None:
    prove(read_config(SHAPES / name), compute_dtype="float32")


@pytest.mark.parametrize("name", FIRST_OF_KIND.values())
def test_every_kind_takes_the_special_tokens_of_another_tokenizer(name: str) -> None:
    tokens = {"bos_token_id": None, "eos_token_id": 5, "pad_token_id": None}
    config = read_config(SHAPES / name, overrides=tokens)
    assert {key: getattr(config, key) for key in tokens} == tokens


@pytest.mark.parametrize("name", TABLE)
def test_the_file_is_small_and_says_nothing_of_quantisation(name: str) -> None:
    text = (SHAPES / name / "config.json").read_text()
    assert "quantization_config" not in text and "dtype" not in text
    assert len(text.splitlines()) < 60
