"""dataset_info.json: columns and tags of LLaMA-Factory become ours, or one clear error."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import DataNames, DataOptions, Row, find_sources, load_corpus
from megatrain.data.names import check_names
from megatrain.errors import UserError
from tests.tokenizers_for_tests import byte_tokenizer

TOKENIZER: Any = byte_tokenizer()


def registry(folder: Path, entries: Any, **files: list[Any]) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    for name, records in files.items():
        (folder / f"{name}.json").write_text(json.dumps(records))
    return folder


def load(folder: Path, *names: str) -> list[Row]:
    sources = find_sources(DataNames(registered=names, registry_dir=str(folder)))
    return list(load_corpus(sources, TOKENIZER, DataOptions()))


def shown(row: Row) -> tuple[str, str]:
    """(the whole text, what is supervised)."""
    return TOKENIZER.decode(row.input_ids), TOKENIZER.decode(row.input_ids[row.weights > 0])


def turns(*pairs: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in pairs)


def test_alpaca_with_the_columns_of_the_entry(tmp_path: Path) -> None:
    entry = {
        "file_name": "a.json",
        "columns": {
            "prompt": "q",
            "query": "more",
            "response": "a",
            "system": "sys",
            "history": "before",
        },
    }
    full = {"q": "2+2?", "more": "quick", "a": "4", "sys": "Be brief.", "before": [["Hi", "Ho"]]}
    registry(tmp_path, {"x": entry}, a=[full])
    (row,) = load(tmp_path, "x")
    assert shown(row) == (
        turns(
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Ho"),
            ("user", "2+2?\nquick"),
            ("assistant", "4"),
        ),
        "Ho<|im_end|>\n4<|im_end|>\n",
    )


def test_a_column_that_is_not_named_is_not_read(tmp_path: Path) -> None:
    record = {"instruction": "i", "input": "hidden", "output": "o", "system": "hidden"}
    columns = {"prompt": "instruction", "response": "output"}
    entries = {
        "named": {"file_name": "a.json", "columns": columns},
        "plain": {"file_name": "a.json"},
    }
    registry(tmp_path, entries, a=[record])
    (row,) = load(tmp_path, "named")
    assert shown(row)[0] == turns(("user", "i"), ("assistant", "o"))
    (row,) = load(tmp_path, "plain")
    assert shown(row)[0] == turns(("user", "i\nhidden"), ("assistant", "o"))


def test_a_prompt_alone_is_a_text(tmp_path: Path) -> None:
    entry = {"file_name": "a.json", "columns": {"prompt": "content"}}
    registry(tmp_path, {"x": entry}, a=[{"content": "once upon", "output": "no"}])
    (row,) = load(tmp_path, "x")
    assert shown(row)[0] == "once upon<|endoftext|>"


def test_sharegpt_with_the_tags_of_the_entry(tmp_path: Path) -> None:
    entry = {
        "file_name": "a.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "about"},
        "tags": {
            "role_tag": "who",
            "content_tag": "what",
            "user_tag": "ask",
            "assistant_tag": "answer",
            "observation_tag": "seen",
        },
    }
    talk = [("ask", "1"), ("answer", "2"), ("seen", "3"), ("answer", "4")]
    record = {"talk": [{"who": who, "what": what} for who, what in talk], "about": "s"}
    registry(tmp_path, {"x": entry}, a=[record, {"talk": record["talk"]}])
    first, second = load(tmp_path, "x")
    spoken = (("user", "1"), ("assistant", "2"), ("tool", "3"), ("assistant", "4"))
    assert shown(first)[0] == turns(("system", "s"), *spoken)
    assert shown(second) == (turns(*spoken), "2<|im_end|>\n4<|im_end|>\n")


def test_openai_messages_keep_what_else_is_in_them(tmp_path: Path) -> None:
    entry = {
        "file_name": "a.json",
        "formatting": "openai",
        "columns": {"messages": "messages"},
    }
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "weight": 0},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
    ]
    registry(tmp_path, {"x": entry}, a=[{"messages": messages}])
    (row,) = load(tmp_path, "x")
    assert shown(row)[1] == "4<|im_end|>\n"


def test_several_names_are_put_one_after_the_other_each_with_its_own_format(
    tmp_path: Path,
) -> None:
    entries = {
        "x": {"file_name": "a.json"},
        "y": {"file_name": "b.json", "columns": {"prompt": "text"}},
    }
    registry(tmp_path, entries, a=[{"instruction": "i", "output": "o"}], b=[{"text": "t"}])
    rows = load(tmp_path, "y", "x")
    assert [shown(row)[1] for row in rows] == ["t<|endoftext|>", "o<|im_end|>\n"]
    with pytest.raises(UserError, match="'x': its name twice"):
        load(tmp_path, "x", "x")


GOOD = {"file_name": "a.json"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"dataset_info\.json: a JSON list"),
        ({"y": GOOD}, r"'x': no such entry in .*dataset_info\.json"),
        ({"xs": GOOD}, r"no such entry .*there is 'xs'"),
        ({"x": 3}, r"'x' of .*: a JSON int"),
        ({"x": {}}, "no file_name"),
        ({"x": {"file_name": "none.json"}}, r"which names .*none\.json: no such file.*file_name"),
        ({"x": {"script_url": "a"}}, "script_url, from which nothing is read here"),
        ({"x": GOOD | {"ranking": True}}, "ranking: True: .*a preference"),
        ({"x": GOOD | {"num_samples": 5}}, "num_samples: 5: .*a file of their own"),
        ({"x": GOOD | {"formating": "alpaca"}}, "'formating' in .*there is 'formatting'"),
        ({"x": GOOD | {"formatting": "chat"}}, "formatting: chat: no such formatting"),
        ({"x": GOOD | {"columns": {"promt": "q"}}}, "'promt' in .*columns: .*there is 'prompt'"),
        ({"x": GOOD | {"columns": {"chosen": "q"}}}, "with the column 'chosen'"),
        ({"x": GOOD | {"columns": {"images": "q"}}}, "with the column 'images'"),
        ({"x": GOOD | {"columns": {"response": "q"}}}, "no prompt among them"),
        ({"x": GOOD | {"columns": []}}, "columns of .*no object of texts"),
        ({"x": GOOD | {"tags": {"user_tags": "q"}}}, "'user_tags' in .*there is 'user_tag'"),
    ],
)
def test_an_entry_that_cannot_be_met_is_refused_before_anything_is_read(
    entries: Any, message: str, tmp_path: Path
) -> None:
    registry(tmp_path, entries, a=[])
    with pytest.raises(UserError, match=message):
        check_names(DataNames(registered=["x"], registry_dir=str(tmp_path)))


def test_a_registry_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset_info\.json: No such file .*set dataset_dir"):
        check_names(DataNames(registered=["x"], registry_dir=str(tmp_path)))
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="no JSON"):
        check_names(DataNames(registered=["x"], registry_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "record", "message"),
    [
        (
            {"columns": {"prompt": "question", "response": "answer"}},
            {"questions": "q", "answer": "a"},
            r"column 'question' at .*a\.json:item 0: no such column \(there is 'questions'\)",
        ),
        (
            {"formatting": "sharegpt"},
            {"conversations": [{"from": "robot", "value": "a"}]},
            r"turn 0 at .*item 0: from 'robot'. use one of human, gpt",
        ),
        (
            {"formatting": "sharegpt"},
            {"conversations": [{"role": "user", "value": "a"}]},
            r"turn 0 at .*item 0: no 'from' in it",
        ),
        ({"formatting": "sharegpt"}, {"conversations": "a"}, "conversations at .*a str"),
    ],
)
def test_a_record_that_the_entry_does_not_fit(
    fields: Any, record: Any, message: str, tmp_path: Path
) -> None:
    registry(tmp_path, {"x": GOOD | fields}, a=[record])
    with pytest.raises(UserError, match=message):
        load(tmp_path, "x")


@pytest.mark.parametrize("weight", [0, -1.0, float("inf")])
def test_a_weight_that_is_none(weight: float, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"a\.txt with a weight of .*: no share of a mixture"):
        check_names(DataNames(files={str(tmp_path / "a.txt"): weight}))
