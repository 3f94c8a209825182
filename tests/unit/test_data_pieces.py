"""Files larger than memory: read in pieces, with the records and the errors of a whole file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.data import DataOptions, load_rows
from megatrain.data import pieces as text_pieces
from megatrain.data.files import read_records
from megatrain.errors import UserError
from tests.tokenizers_for_tests import byte_tokenizer
from tests.unit.test_data_rows import closing_tokenizer

TOKENIZER: Any = byte_tokenizer()
SIZES = [1, 2, 3, 5, 17, 2**20]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    items=st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=6),
    size=st.sampled_from(SIZES),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_a_list_in_pieces_is_the_list(
    items: list[Any], size: int, indent: int | None, ascii_only: bool, tmp_path: Path
) -> None:
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only)
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf \n" + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_pieces, "CHUNK_BYTES", size)
        found = list(read_records(tmp_path / "a.json"))
    assert [record.value for record in found] == items
    assert [record.place.split(":")[-1] for record in found] == [
        f"item {number}" for number in range(len(items))
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n {"b" 2}]', r"Expecting ':' delimiter at line 2, column 7"),
        (b'[{"a": 1},\n {"b": 2}\n', r"Expecting ',' delimiter at line 3, column 1"),
        (b'[{"a": 1},\n {"b": "2\n', r"at line 2, column (8|10)"),
        (b'[{"a": 1}\n {"b": 2}]', r"Expecting ',' delimiter at line 2, column 2"),
        (b'[{"a": 1}] {', r"Extra data at line 1, column 12"),
        (b'[{"a": 1}, 34]', r"item 1: a JSON int"),
        (b'[{"a": 1}, \n]', r"Expecting value at line 2, column 1"),
        (b"[{'a': 1}]", r"property name enclosed in double quotes.* at line 1, column 3"),
        (b'[{"a": "\\ud83d"}]', r"item 0: half of a surrogate pair"),
        (b'[{"a": "x\n\xe9"}]', r"a\.json:2: bytes that are not UTF-8 at offset 10"),
        (b'[{"a": "\xf0\x9f\x98', r"a\.json:1: bytes that are not UTF-8 at offset 8"),
    ],
)
def test_what_is_wrong_in_a_list_is_told_with_its_place(
    content: bytes, message: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pieces, "CHUNK_BYTES", size)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_records(tmp_path / "a.json"))


@pytest.mark.parametrize("size", SIZES)
def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {i} é😀\n" for i in range(40)) + "z" * 100 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(text_pieces, "CHUNK_BYTES", size)
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 50)
    records = list(read_records(tmp_path / "a.txt"))
    pieces = [record.value["text"] for record in records]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 50
    assert all(piece.endswith("\n") for piece in pieces[:8])
    assert [record.begins for record in records] == [True] + [False] * (len(records) - 1)
    assert [record.ends for record in records] == [False] * (len(records) - 1) + [True]
    assert records[1].place == f"{tmp_path}/a.txt:{1 + pieces[0].count(chr(10))}"


@pytest.mark.parametrize("make", [byte_tokenizer, closing_tokenizer])
def test_pieces_of_a_text_have_the_tokens_of_the_whole(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make()
    (tmp_path / "a.txt").write_text("one line\n" * 30)
    whole = load_rows(tmp_path / "a.txt", tokenizer, DataOptions(max_length=64))
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 100)
    pieces = load_rows(tmp_path / "a.txt", tokenizer, DataOptions(max_length=64))
    assert pieces.stats.records == 3 and pieces.stats.tokens == whole.stats.tokens
    joined = [[int(i) for row in rows for i in row.input_ids] for rows in (whole, pieces)]
    assert joined[0] == joined[1]


def test_records_of_two_formats_are_told(tmp_path: Path) -> None:
    lines = [{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=r"jsonl:2 as text.*a record of the format messages.*mix"):
        load_rows(tmp_path / "a.jsonl", TOKENIZER, DataOptions())
