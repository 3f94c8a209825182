"""Kept rows, texts cut to length, counts, the order of steps, loading of tokenizers."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from megatrain.data import (
    ChosenRows,
    DataOptions,
    DatasetStats,
    Row,
    StepSampler,
    TokenizedRows,
    load_rows,
    load_tokenizer,
    split_rows,
)
from megatrain.errors import UserError
from tests.tokenizers_for_tests import CHATML, LLAMA3, byte_tokenizer

TOKENIZER: Any = byte_tokenizer()
END = TOKENIZER.eos_token_id


def write(folder: Path, *records: Any) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def closing_tokenizer() -> Any:
    """One that opens and closes every text by itself."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A <|endoftext|>",
        special_tokens=[
            (word, tokenizer.convert_tokens_to_ids(word)) for word in ("<|start|>", "<|endoftext|>")
        ],
    )
    return tokenizer


def test_rows_are_a_sequence_of_copies(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path, {"text": "abc"}, {"text": "de"}), TOKENIZER, DataOptions())
    assert [TOKENIZER.decode(row.input_ids.tolist()) for row in rows] == [
        "abc<|endoftext|>",
        "de<|endoftext|>",
    ]
    assert [len(row.input_ids) for row in rows[::-1]] == [3, 4]
    assert rows[-1].input_ids.tolist() == rows[1].input_ids.tolist()
    assert (rows[0].input_ids.dtype.name, rows[0].weights.dtype.name) == ("int64", "float32")
    for index in (2, -3):
        with pytest.raises(IndexError):
            rows[index]
    rows[0].weights[:] = 0
    rows[0].input_ids[:] = 0
    assert rows[0].weights.all() and rows[0].input_ids.all()


def test_rows_may_lie_in_mapped_files(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path, {"text": "abc"}, {"text": "de"}), TOKENIZER, DataOptions())
    parts = {}
    for name, values in {
        "input_ids": np.concatenate([row.input_ids for row in rows]).astype(np.int32),
        "weights": np.concatenate([row.weights for row in rows]),
        "offsets": np.array([0, 4, 7]),
    }.items():
        np.save(tmp_path / f"{name}.npy", values)
        parts[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    mapped = TokenizedRows(**parts, stats=rows.stats)
    for one, other in zip(mapped, rows, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.weights.tolist() == other.weights.tolist()


def test_every_record_is_accounted_for(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "ab", "completion": "cd"},  # 5 tokens
        {"prompt": "a" * 9, "completion": "b"},  # cut, nothing left
        {"prompt": "a", "completion": "b" * 9},  # cut, some left
        {"prompt": "", "completion": ""},  # the end-of-sequence token alone
        {"prompt": "abc", "completion": ""},  # teaches to end
    )
    rows = load_rows(path, TOKENIZER, DataOptions(max_length=6))
    assert rows.stats == DatasetStats(
        records=5,
        rows=3,
        tokens=5 + 6 + 4,
        supervised_tokens=3 + 5 + 1,
        longest=6,
        truncated=2,
        skipped=2,
        empty=1,
        largest_token=END,
    )
    assert rows.stats.losses_in_words() == [
        "2 of 5 records (40%) are skipped: nothing in them is supervised",
        "2 of 5 records (40%) are cut at max_length",
    ]
    few = dataclasses.replace(rows.stats, records=100, skipped=5, truncated=5, dropped=15)
    assert few.losses_in_words() == ["15 of 100 records (15%) are dropped: longer than max_length"]


def test_nothing_left_to_learn_says_how_it_came_about(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a" * 9, "completion": "b"}, {"prompt": "", "completion": ""})
    with pytest.raises(UserError, match=r"\(1 are empty, 1 have none within the first 6 tokens\)"):
        load_rows(path, TOKENIZER, DataOptions(max_length=6))


@pytest.mark.parametrize(
    ("length", "rows"),
    [(3, [4]), (7, [8]), (8, [8, 2]), (9, [8, 2]), (15, [8, 8]), (16, [8, 8, 2])],
)
def test_a_text_teaches_its_end_whatever_its_length(
    length: int, rows: list[int], tmp_path: Path
) -> None:
    text = "abcdefghijklmnop"[:length]
    loaded = load_rows(write(tmp_path, {"text": text}), TOKENIZER, DataOptions(max_length=8))
    assert [len(row.input_ids) for row in loaded] == rows
    assert loaded[-1].input_ids[-1] == END and len(loaded[-1].input_ids) > 1
    assert (loaded.stats.truncated, loaded.stats.skipped) == (0, 0)


def test_the_end_of_texts_is_optional_and_never_doubled(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "abc"}, {"text": "abc<|endoftext|>"}, {"text": ""})
    rows = load_rows(path, TOKENIZER, DataOptions())
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist()
    assert (rows.stats.skipped, rows.stats.empty) == (1, 1)
    bare = load_rows(path, TOKENIZER, DataOptions(text_end_of_sequence=False))
    assert [len(row.input_ids) for row in bare] == [3, 4]


def test_a_tokenizer_that_opens_and_closes_texts_itself(tmp_path: Path) -> None:
    tokenizer = closing_tokenizer()
    path = write(tmp_path, {"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": ""})
    rows = load_rows(path, tokenizer, DataOptions())
    assert rows[0].input_ids.tolist() == tokenizer("abcd")["input_ids"]
    assert rows[0].weights.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows[1].weights.tolist() == [0, 0, 0, 1]
    text = load_rows(write(tmp_path, {"text": ""}, {"text": "a"}), tokenizer, DataOptions())
    assert [row.input_ids.tolist() for row in text] == [tokenizer("a")["input_ids"]]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    rows = load_rows(tmp_path / "a.txt", TOKENIZER, DataOptions())
    assert [TOKENIZER.decode(row.input_ids.tolist()) for row in rows] == [
        "one\n\ntwo\n<|endoftext|>"
    ]


def test_the_last_short_step_is_kept_or_dropped() -> None:
    kept = StepSampler(10, 4, seed=1, shuffle=True)
    dropped = StepSampler(10, 4, seed=1, shuffle=True, drop_last=True)
    assert (kept.steps_per_epoch, dropped.steps_per_epoch) == (3, 2)
    assert [len(kept.row_indices(step)) for step in range(6)] == [4, 4, 2] * 2
    assert [len(dropped.row_indices(step)) for step in range(4)] == [4] * 4
    assert dropped.row_indices(2) == kept.row_indices(3)  # the second epoch begins
    assert StepSampler(8, 4, seed=1, shuffle=True).steps_per_epoch == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0, "rows_per_step": 1, "seed": 0}, "0 rows"),
        ({"num_rows": 1, "rows_per_step": 0, "seed": 0}, "steps of 0 rows"),
        ({"num_rows": 3, "rows_per_step": 4, "seed": 0, "drop_last": True}, "3 rows"),
        ({"num_rows": 3, "rows_per_step": 1, "seed": -1}, "seed -1: a negative number"),
    ],
)
def test_steps_that_cannot_be_taken(arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StepSampler(**arguments, shuffle=True)


@pytest.mark.parametrize("held_out", [-1, 1.5, 11, 0, 0.01, float("nan"), float("inf")])
def test_a_share_that_cannot_be_held_out(held_out: float) -> None:
    with pytest.raises(UserError, match="hold out"):
        split_rows(range(10), held_out, seed=1)
    assert split_rows(range(10), 3.0, seed=1) == split_rows(range(10), 3, seed=1)


def test_what_is_held_out_does_not_follow_the_order_of_an_epoch() -> None:
    _, held_out = split_rows(range(100), 10, seed=1)
    first_steps = StepSampler(100, 10, seed=1, shuffle=True).row_indices(0)
    assert sorted(first_steps) != held_out


def test_a_directory_is_never_looked_for_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def remember(path: str, **options: Any) -> Any:
        asked.append({"path": path} | options)
        return byte_tokenizer()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", remember)
    load_tokenizer(tmp_path)
    assert asked == [{"path": str(tmp_path), "local_files_only": True}]


def test_a_tokenizer_comes_back_from_its_directory(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert loaded("a b")["input_ids"] == TOKENIZER("a b")["input_ids"]
    assert (loaded.eos_token_id, loaded.chat_template) == (END, CHATML)
    other = load_tokenizer(tmp_path / "model", chat_template=LLAMA3)
    (tmp_path / "own.jinja").write_text(LLAMA3)
    file = load_tokenizer(tmp_path / "model", chat_template=str(tmp_path / "own.jinja"))
    assert other.chat_template == file.chat_template == LLAMA3
    assert pickle.loads(pickle.dumps(loaded))("a")["input_ids"] == loaded("a")["input_ids"]


def test_a_missing_tokenizer_or_template_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"the tokenizer of {missing}: none that loads"):
            load_tokenizer(missing)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="none that loads"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"chat template none\.jinja: no such file"):
        load_tokenizer(tmp_path, chat_template="none.jinja")


def test_chosen_rows_are_those_rows() -> None:
    rows = [Row(input_ids=np.array([i, i]), weights=np.ones(2, np.float32)) for i in range(5)]
    chosen = ChosenRows(rows, [4, 0, 2])
    assert len(chosen) == 3
    assert [int(row.input_ids[0]) for row in chosen] == [4, 0, 2]
    assert [int(row.input_ids[0]) for row in chosen[1:9]] == [0, 2]
    assert chosen[-1] is rows[2]
    with pytest.raises(IndexError):
        chosen[3]


def test_what_was_lost_before_is_told_where_too_little_is_left_to_hold_out() -> None:
    with pytest.raises(UserError, match=r"two parts; 9 of 9 records .*is max_length too small"):
        split_rows(range(1), 0.1, seed=1, losses=["9 of 9 records (100%) are cut at max_length"])
