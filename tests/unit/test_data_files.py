"""Files and what may be wrong with them: every mistake is one error that names its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import DataOptions, load_rows
from megatrain.data.files import find_files, read_records
from megatrain.errors import UserError
from tests.tokenizers_for_tests import byte_tokenizer

TOKENIZER: Any = byte_tokenizer()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"', r"a\.jsonl:2: .*at column 13.*one whole JSON"),
        ("a.jsonl", b'[\n{"text": "a"}\n]', r"a\.jsonl:1: .*each line one whole JSON object"),
        ("a.jsonl", b'{"text": "a"}\r\n\r\n3', r"a\.jsonl:3: a JSON int"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}', r"jsonl:3: .*not UTF-8 at offset 25"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), r"jsonl:1: .*the file is UTF-16"),
        ("a.jsonl", b'{"text": "\\ud83d"}', r"jsonl:1: half of a surrogate pair, \\ud83d"),
        ("a.jsonl", b"[" * 200_000, r"jsonl:1: .*nested too deep"),
        ("a.json", b'[{"text": "a"},\n{"text" "b"}]', r"a\.json: .*line 2, column 9.*one list"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}', r"a\.json: Extra data.*\.jsonl"),
        ("a.json", b'[{"text": "a"}, 3]', r"a\.json:item 1: a JSON int"),
        ("a.json", b"", r"JSON at .*a\.json: Expecting value"),
        ("a.json", b"[]", "no record"),
        ("a.txt", b"good\n\xe9", r"a\.txt:2: .*not UTF-8 at offset 5"),
        ("a.jsonl", b"\n\n", "no record"),
        ("a.jsonl", b'{"text": ""}', r"no supervised token in any \(1 are empty, 0 have no "),
        ("a.jsonl", b'{"question": "a", "answer": "b"}', "set dataset_text_field, or prompt"),
        ("a.jsonl", b'{"mesages": []}', r"columns mesages.*'messages' \('mesages' is near\)"),
        ("a.jsonl", b'{"prompt": "a", "completion": null}', r"completion' \(str or list\).*NoneT"),
        ("a.jsonl", b"{}", "the columns none"),
        (
            "a.jsonl",
            b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completions": "b"}',
            r"a\.jsonl:2: no such column \(there is 'completions'\)",
        ),
    ],
)
def test_what_cannot_be_read_names_its_place(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rows(tmp_path / name, TOKENIZER, DataOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "mesages"}, "no such format.*there is 'messages'"),
        ({"format": "text"}, r"column 'text' \(str\) at .*no such column"),
        ({"max_length": 1}, "no room for a token and its target"),
        ({"max_length": 0}, "set max_length to 2 or more"),
        ({"prompt_column": "a", "completion_column": "a"}, "the same column as the completion"),
        ({"prompt_column": "prompts"}, r"rename a column to 'prompts' \('prompt' is near\)"),
    ],
)
def test_options_that_no_data_meets(options: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(UserError, match=message):
        load_rows(tmp_path / "a.jsonl", TOKENIZER, DataOptions(**options))


def test_files_folders_and_globs_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.jsonl", "c.md", "inner/d.json", "inner/deep/e.json", "[1].txt"):
        (tmp_path / name).write_text("x")

    def names(*paths: str | Path) -> list[str]:
        return [file.name for file in find_files(paths)]

    assert names(tmp_path) == ["[1].txt", "a.jsonl", "b.txt"]
    assert names(tmp_path / "b.txt", str(tmp_path / "*.jsonl")) == ["b.txt", "a.jsonl"]
    assert names(f"{tmp_path}/**/*.json") == ["d.json", "e.json"]
    assert names(f"{tmp_path}/[1].txt") == ["[1].txt"]
    assert find_files(str(tmp_path / "b.txt")) == find_files(tmp_path / "b.txt")
    with pytest.raises(UserError, match=r"kind '\.md'"):
        find_files(f"{tmp_path}/*.md")
    (tmp_path / "none").mkdir()
    for missing in (tmp_path / "none", f"{tmp_path}/*.csv", "nowhere.jsonl"):
        with pytest.raises(UserError, match="no such file, folder with data files, or match"):
            find_files(missing)
    with pytest.raises(UserError, match="an empty list"):
        find_files([])


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_that_may_not_be_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=f"{name}: Permission denied"):
        list(read_records(tmp_path / name))


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    for name, text in {
        "a.jsonl": '{"text": "a"}',
        "a.json": '[{"text": "a"}]',
        "a.txt": "a",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [record.value for record in read_records(tmp_path / name)] == [{"text": "a"}]


def test_escaped_characters_survive(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "é 😀 \\ud83d"}))
    [record] = read_records(tmp_path / "a.jsonl")
    assert record.value == {"text": "é 😀 \\ud83d"}
