"""Files and formats that people bring from elsewhere: nothing in them is lost or guessed."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.data import DataOptions, Row, load_rows
from megatrain.data.files import find_files, read_records
from megatrain.errors import UserError
from tests.tokenizers_for_tests import byte_tokenizer

TOKENIZER: Any = byte_tokenizer()
BASE: Any = byte_tokenizer(None)
RECORDS = [{"text": "first, with a comma"}, {"text": 'a "quoted"\nsecond'}]


def rows_of(
    records: list[dict[str, Any]], tmp_path: Path, tokenizer: Any = TOKENIZER, **options: Any
) -> list[Row]:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return list(load_rows(path, tokenizer, DataOptions(**options)))


def supervised(row: Row) -> str:
    return str(TOKENIZER.decode(row.input_ids[row.weights > 0]))


def whole(row: Row) -> str:
    return str(TOKENIZER.decode(row.input_ids))


def write_csv(path: Path) -> None:
    import csv

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(RECORDS)


def write_arrow(path: Path, *, stream: bool) -> None:
    table = pa.Table.from_pylist(RECORDS)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table)


LINES = "\n".join(map(json.dumps, RECORDS)).encode()
WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.csv": write_csv,
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES, mtime=0)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.json.xz": lambda path: path.write_bytes(lzma.compress(json.dumps(RECORDS).encode())),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(RECORDS), path),
    "a.arrow": lambda path: write_arrow(path, stream=False),
    "stream.arrow": lambda path: write_arrow(path, stream=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_has_the_same_records(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert find_files(tmp_path) == [tmp_path / name]
    found = list(read_records(tmp_path / name))
    assert [record.value for record in found] == RECORDS
    assert all(record.place.startswith(str(tmp_path / name)) for record in found)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,b\nx,1\ny,2,3\n", r"a\.csv:3: more cells than columns.*quote cells"),
        ("a.csv", b"text,b\nx\n", r"a\.csv:2: too few cells"),
        ("a.csv", b'text\n"x\n', r"a\.csv:1: unexpected end of data"),
        ("a.csv", b"text\n\xff\n", r"a\.csv:2: bytes that are not UTF-8"),
        (
            "a.jsonl.gz",
            gzip.compress(LINES, mtime=0)[:-9],
            "compressed data that is damaged or cut off",
        ),
        ("a.jsonl.gz", LINES, "damaged or cut off .*gzip"),
        ("a.jsonl.xz", LINES, "damaged or cut off"),
        ("a.jsonl.bz2", LINES, "damaged or cut off"),
        ("a.parquet", LINES, r"a\.parquet: .*[Pp]arquet"),
        ("a.arrow", LINES, r"a\.arrow: "),
        ("a.parquet.gz", b"", "a file of kind '.parquet.gz'"),
        ("a.jsonl.zip", b"", "a file of kind '.jsonl.zip'"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rows(path, TOKENIZER, DataOptions())


def test_without_pyarrow_its_files_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'megatrain\[data\]'"):
        list(read_records(tmp_path / "a.parquet"))


def test_sharegpt_keeps_turns_system_and_tools(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "2+2?"},
        {"from": "gpt", "value": "4"},
        {"from": "human", "value": "sure?"},
        {"from": "gpt", "value": "yes"},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    (row,) = rows_of([{"conversations": turns, "system": "Be brief."}], tmp_path)
    (other,) = rows_of([{"messages": messages}], tmp_path)
    (third,) = rows_of([{"conversations": messages}], tmp_path)
    for each in (other, third):
        assert np.array_equal(each.input_ids, row.input_ids)
        assert np.array_equal(each.weights, row.weights)
    assert supervised(row) == "4<|im_end|>\nyes<|im_end|>\n"


def test_a_function_call_is_a_tool_call(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['tool_calls'] %}"
        "{% for c in m['tool_calls'] %}CALL {{ c['function']['name'] }}"
        "({{ c['function']['arguments'] | tojson }}){% endfor %}{% else %}{{ m['content'] }}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sky"}}'},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "It is blue."},
    ]
    (row,) = rows_of([{"conversations": turns}], tmp_path, byte_tokenizer(template))
    assert supervised(row) == 'CALL look({"at": "sky"})<|im_end|>\nIt is blue.<|im_end|>\n'
    assert "<|im_start|>tool\nblue<|im_end|>" in whole(row)


def test_alpaca_through_a_template_and_without_one(tmp_path: Path) -> None:
    record = {
        "instruction": "Add.",
        "input": "2 and 2",
        "output": "4",
        "system": "Be brief.",
        "history": [["Hi", "Hello"]],
    }
    (row,) = rows_of([record], tmp_path)
    assert supervised(row) == "Hello<|im_end|>\n4<|im_end|>\n"
    assert "<|im_start|>user\nAdd.\n2 and 2<|im_end|>" in whole(row)
    assert whole(row).startswith("<|im_start|>system\nBe brief.")
    plain = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
    (base,) = rows_of([plain], tmp_path, BASE)
    assert supervised(base) == "4<|endoftext|>"
    assert whole(base).endswith("### Input:\n2 and 2\n\n### Response:\n4<|endoftext|>")
    (short,) = rows_of([plain | {"input": ""}], tmp_path, BASE)
    assert "### Input" not in whole(short) and supervised(short) == "4<|endoftext|>"
    with pytest.raises(UserError, match=r"column 'history'.*no place for it in Alpaca's prompt"):
        rows_of([record | {"system": ""}], tmp_path, BASE)


def test_tokens_with_labels_and_masks(tmp_path: Path) -> None:
    rows = rows_of(
        [
            {"input_ids": [5, 6, 7]},
            {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
            {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]},
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "assistant_masks": [0, 0, 1]},
        ],
        tmp_path,
    )
    assert [row.weights.tolist() for row in rows] == [
        [1, 1, 1],
        [0, 0, 1],
        [0, 1, 1],
        [0, 0, 1],
    ]


def test_a_message_may_have_a_weight(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "good", "weight": 0.5},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "best"},
    ]
    (row,) = rows_of([{"messages": turns}], tmp_path)
    assert supervised(row) == "good<|im_end|>\nbest<|im_end|>\n"
    assert set(row.weights.tolist()) == {0.0, 0.5, 1.0}
    with pytest.raises(UserError, match="assistant_only_loss: false, where every token counts"):
        rows_of([{"messages": turns}], tmp_path, assistant_only_loss=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": "x"}, r"conversations at .*a str.*from one of human"),
        ({"conversations": [3]}, r"a int \(turn 0\)"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"from 'alien' \(turn 0\)"),
        ({"conversations": [{"from": "gpt"}]}, r"no value from 'gpt'"),
        (
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "a function_call that is no JSON",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "a function_call without a name",
        ),
        ({"instruction": "a", "output": 3}, r"column 'output' \(str\).*a int"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "entry 0 that is none"),
        ({"instruction": "a", "output": "b", "history": "x"}, "history at .*a str"),
        ({"instruction": "a", "output": "b", "system": 3}, r"column 'system' \(str\)"),
        ({"input_ids": [1, 2.5]}, "a float among them"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 of them beside 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "2 where the token is 1"),
        ({"input_ids": [1, -2]}, "token -2"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a", "weight": 1},
                    {"role": "assistant", "content": "b"},
                ]
            },
            "a weight of 1 for role 'user'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b", "weight": -1},
                ]
            },
            "a weight of -1",
        ),
    ],
)
def test_bad_records_are_one_error(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rows_of([record], tmp_path)
    assert "a.jsonl:1" in str(caught.value)
