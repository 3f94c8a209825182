"""Keys are strict, synonyms are said, mistakes are one clear line."""

from pathlib import Path

import pytest

from megatrain.config import TrainConfig, document, make_config, parse_overrides, read_config
from megatrain.errors import UserError
from megatrain.units import format_bytes, parse_bytes

NEEDED = {"model_name_or_path": "m", "train_files": ["t"], "output_dir": "o"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"qqqq": 1}, "no such key"),
        ({"max_length": "long"}, "max_length: .*found 'long'"),
        ({"per_device_train_batch_size": 0}, "greater than or equal to 1"),
        ({"dtype": "float16"}, "dtype: "),
        ({"deepspeed": "z3.json"}, "does its own offload"),
        ({"fp16": True}, "use dtype"),
        ({"optim": "sgd"}, "only AdamW"),
        ({"host_memory": "much"}, "not a size"),
    ],
)
def test_mistakes(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config(NEEDED | values)


def test_a_required_key_is_named() -> None:
    with pytest.raises(UserError, match="output_dir: field required"):
        make_config({"model_name_or_path": "m", "train_files": ["t"]})


def test_synonyms_and_keys_met_by_design_are_noticed() -> None:
    config, notices = make_config(
        NEEDED | {"cutoff_len": 77, "bf16": True, "fsdp": None, "learning_rate": "1e-5"}
    )
    assert config.max_length == 77
    assert config.learning_rate == 1e-5
    assert len(notices) == 2
    assert "cutoff_len is taken as max_length" in notices


def test_overrides_in_three_spellings() -> None:
    found = parse_overrides(["--max-length", "5", "--seed=3", "frozen=[a, b]"])
    assert found == {"max_length": 5, "seed": 3, "frozen": ["a", "b"]}
    for wrong in (["--seed"], ["seed"]):
        with pytest.raises(UserError, match="no value"):
            parse_overrides(wrong)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "YAML"), ("", "no keys"), ("- 1", "no keys")]
)
def test_malformed_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path / "c.yaml")


def test_the_documentation_is_current() -> None:
    path = Path(__file__).parents[2] / "docs" / "config.md"
    assert path.read_text() == document(), "run `make docs`"
    assert all(info.description for info in TrainConfig.model_fields.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("24G", 24 * 2**30), ("24000MB", 24 * 10**9), ("7", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_sizes_are_printed_in_the_largest_unit() -> None:
    assert [format_bytes(n) for n in (7, 2048, 3 * 2**30)] == ["7 B", "2.00 KiB", "3.00 GiB"]
