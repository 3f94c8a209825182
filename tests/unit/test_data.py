"""Files to rows: formats, supervision shown as decoded text, truncation, bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import DataOptions, Row, StepSampler, load_rows, split_rows
from megatrain.errors import UserError
from tests.tokenizers_for_tests import CHATML, LLAMA3, REWRITING, byte_tokenizer

TOKENIZER = byte_tokenizer()
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def write(path: Path, *records: Any) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def supervised(row: Row) -> str:
    return TOKENIZER.decode([int(i) for i, w in zip(row.input_ids, row.weights, strict=True) if w])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "Hello.<|im_end|>\n4<|im_end|>\n"),
        (LLAMA3, "Hello.<|eot|>4<|eot|>"),
    ],
    ids=["chatml", "llama3"],
)
def test_every_assistant_turn_with_its_end_is_supervised(
    template: str, expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    rows = load_rows([path], byte_tokenizer(template), DataOptions())
    assert supervised(rows[0]) == expected
    everything = load_rows([path], byte_tokenizer(template), DataOptions(assistant_only_loss=False))
    assert supervised(everything[0]).startswith(("<|im_start|>system", "<|start|>system"))


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(UserError, match="rewrites earlier turns"):
        load_rows([path], byte_tokenizer(REWRITING), DataOptions())


def test_only_the_completion_and_the_end_are_supervised(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "One and one?", "answer": " Two."})
    options = DataOptions(prompt_column="question", completion_column="answer")
    rows = load_rows([path], TOKENIZER, options)
    ids = TOKENIZER("One and one? Two.")["input_ids"]
    assert list(rows[0].input_ids) == [*ids, TOKENIZER.eos_token_id]
    assert supervised(rows[0]) == " Two.<|endoftext|>"


def test_prompt_and_completion_as_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": CHAT[:2], "completion": CHAT[2:3]})
    assert supervised(load_rows([path], TOKENIZER, DataOptions())[0]) == "Hello.<|im_end|>\n"


def test_text_is_cut_into_rows_that_lose_no_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 3)
    rows = load_rows([str(tmp_path)], TOKENIZER, DataOptions(max_length=8))
    joined = [int(i) for row in rows for i in row.input_ids]
    assert TOKENIZER.decode(joined) == "abcdefghij" * 3 + "<|endoftext|>"
    assert [len(row.input_ids) for row in rows] == [8, 8, 8, 7]
    assert rows.stats.truncated == 0


def test_truncation_and_rows_without_supervision_are_counted(tmp_path: Path) -> None:
    long_prompt = {"prompt": "x" * 50, "completion": "y"}
    long_answer = {"prompt": "x", "completion": "y" * 50}
    path = write(tmp_path / "a.jsonl", long_prompt, long_answer, {"prompt": "", "completion": ""})
    rows = load_rows([path], TOKENIZER, DataOptions(max_length=10))
    assert (len(rows), rows.stats.truncated, rows.stats.skipped) == (1, 2, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl:2.*column"),
        ("a.jsonl", b'["text"]', r"a\.jsonl:1.*list"),
        ("a.jsonl", b"", "no record"),
        ("a.txt", b"", "no supervised token"),
        ("a.jsonl", b'{"text": "\xff"}', "UTF-8 at offset 10"),
        ("a.jsonl", b'{"promt": "a", "completion": "b"}', "rename a column to '"),
        ("a.jsonl", b'{"text": 3}', "a int"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "a"}', r"a\.jsonl:2.*no such column"),
        ("a.jsonl", b'{"messages": []}', "no list of messages"),
        ("a.jsonl", b'{"messages": [{"role": "bot", "content": ""}]}', "role 'bot'"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "without role or content"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}', "no supervised token"),
        ("a.json", b'{"text": "a"}', "JSON dict"),
        ("a.jsonl", b'{"prompt": "a", "completion": []}', "the other messages"),
        ("a.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}', "preference data"),
        ("a.jsonl", b'{"conversations": [], "chosen": {}, "rejected": {}}', "preference data"),
        ("a.bin", b"x", r"kind '\.bin'"),
    ],
)
def test_bad_input_is_one_clear_error(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rows([str(tmp_path / name)], TOKENIZER, DataOptions())


def test_chosen_answers_can_be_trained_on(tmp_path: Path) -> None:
    pair = {"prompt": "One and one?", "chosen": " Two.", "rejected": " Three."}
    options = DataOptions(completion_column="chosen")
    rows = load_rows([write(tmp_path / "a.jsonl", pair)], TOKENIZER, options)
    assert supervised(rows[0]) == " Two.<|endoftext|>"
    beside = pair | {"messages": CHAT}
    rows = load_rows([write(tmp_path / "b.jsonl", beside)], TOKENIZER, DataOptions())
    assert "Hello." in supervised(rows[0])


def test_a_row_longer_than_the_model_has_positions_for_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "short"}, {"text": "longer than that"})
    rows = load_rows(path, TOKENIZER, DataOptions(max_positions=6, max_length=6))
    assert rows.stats.longest == 6
    with pytest.raises(
        UserError, match=r"jsonl:2 as one row: .* 6 positions .*set max_length to 6"
    ):
        load_rows(path, TOKENIZER, DataOptions(max_positions=6))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl.*no such file"):
        load_rows(["nowhere.jsonl"], TOKENIZER, DataOptions())


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(UserError, match="without a chat template"):
        load_rows([path], byte_tokenizer(None), DataOptions())


def test_every_row_comes_once_an_epoch_in_an_order_of_the_seed() -> None:
    sampler = StepSampler(10, 4, seed=1, shuffle=True)
    assert sampler.steps_per_epoch == 3
    epochs = [[i for s in range(3) for i in sampler.row_indices(3 * e + s)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    again = StepSampler(10, 4, seed=1, shuffle=True)
    assert again.row_indices(5) == sampler.row_indices(5)  # asked for directly: no history
    assert StepSampler(10, 4, seed=2, shuffle=True).row_indices(0) != sampler.row_indices(0)
    assert StepSampler(10, 4, seed=1, shuffle=False).row_indices(1) == [4, 5, 6, 7]


def test_a_held_out_part_is_a_function_of_the_seed() -> None:
    rows = [object()] * 10
    keep, hold = split_rows(rows, 0.3, seed=1)
    assert (len(keep), len(hold)) == (7, 3)
    assert sorted(keep + hold) == list(range(10))
    assert split_rows(rows, 3, seed=1) == (keep, hold)
    with pytest.raises(UserError, match="nothing left"):
        split_rows(rows, 10, seed=1)
