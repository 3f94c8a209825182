"""LLaMA-Factory's registry of data sets: `dataset_info.json`, and the names in it.

Its fields: https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md.  As there, `columns`
names every column that is read; only an entry without it has the default ones.  What trains
nothing here (pairs to rank, pictures) is refused by name.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.data.files import Record, find_files
from megatrain.data.hub import HubDataset, check_hub, hub_source
from megatrain.data.source import Source, files_source
from megatrain.errors import UserError

FILE = "dataset_info.json"
HUB, ELSEWHERE = "hf_hub_url", ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
REFUSED = {
    "ranking": "pairs to rank train a preference, and here is none",
    "num_samples": "keep so many records in a file of their own",
}
KNOWN = {
    "file_name",
    "file_sha1",
    HUB,
    "subset",
    "split",
    "folder",
    "formatting",
    "columns",
    "tags",
    *ELSEWHERE,
}
FORMATTING = ("alpaca", "sharegpt", "openai")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""Default column of each role of a column, and likewise:"""
TURNS = {"messages": "conversations"}
EXTRA = ("system", "tools", "history")
OTHER_COLUMNS = ("images", "videos", "audios", "chosen", "rejected", "kto_tag")
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
SPEAKERS = ("user", "assistant", "observation", "function", "system")
OPENAI_TAGS = TAGS | {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}


class Registry:
    """The entries of one folder's dataset_info.json.

    Args:
        folder: LLaMA-Factory's `dataset_dir`.

    Raises:
        UserError: if there is none, or none that can be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._file = Path(folder), Path(folder) / FILE
        asked = f"the registry {self._file}"
        try:
            entries = json.loads(self._file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                asked=asked,
                found=str(error.strerror),
                change="set dataset_dir to the folder that holds it, or name files in train_files",
            ) from error
        except ValueError as error:
            raise UserError(
                asked=asked, found=f"no JSON ({error})", change="mend the file"
            ) from error
        if not isinstance(entries, dict):
            raise UserError(
                asked=asked,
                found=f"a JSON {type(entries).__name__}",
                change='make it one object, {"NAME": {"file_name": "..."}, ...}',
            )
        self._entries: dict[str, Any] = entries

    def check(self, names: Sequence[str]) -> None:
        """See that all names are there and lead somewhere, without loading a dataset.

        Raises:
            UserError: for the first that does not.
        """
        for name in names:
            entry = self._entry(name)
            if entry.hub is not None:
                check_hub(entry.hub)
            else:
                self._files(entry)

    def source(self, name: str, weight: str | None = None) -> Source:
        """The records of an entry, as records of a format of ours.

        Raises:
            UserError: for a name that is not there, leads nowhere, or asks for what is not done.
        """
        entry = self._entry(name)
        if entry.hub is not None:
            found = hub_source(entry.hub)
        else:
            found = files_source(name, self._files(entry))
        return replace(
            found,
            weight=weight,
            format=entry.columns.format,
            variant=[found.variant, entry.fields],
            adapt=entry.columns.adapted,
        )

    def _files(self, entry: "_Entry") -> list[Path]:
        path = self._folder / str(entry.fields["file_name"])
        try:
            return find_files(path)
        except UserError as error:
            raise UserError(
                asked=f"'{entry.name}' of {self._file}, which names {path}",
                found=error.found,
                change="mend file_name, which is relative to dataset_dir",
            ) from error

    def _entry(self, name: str) -> "_Entry":
        asked = f"the data set '{name}'"
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (there is '{near[0]}')" if near else ""
            raise UserError(
                asked=asked,
                found=f"no such entry in {self._file}{hint}",
                change="use a name from there, or train_files for paths",
            )
        fields = self._entries[name]
        asked += f" of {self._file}"
        if not isinstance(fields, dict):
            raise UserError(
                asked=asked,
                found=f"a JSON {type(fields).__name__}",
                change='make it an object, {"file_name": "..."}',
            )
        return _Entry.of(name, fields, asked)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Where a record has what a format of ours wants."""

    format: str
    columns: Mapping[str, str]
    """Name there, by our name."""
    optional: frozenset[str]
    tags: Mapping[str, str]

    def adapted(self, record: Record) -> Record:
        """A record of our format.

        Raises:
            UserError: for a column or a speaker that is not there.
        """
        value: dict[str, Any] = {}
        for ours, theirs in self.columns.items():
            if theirs in record.value:
                value[ours] = record.value[theirs]
            elif ours not in self.optional:
                near = difflib.get_close_matches(theirs, list(record.value), n=1)
                raise UserError(
                    asked=f"column '{theirs}' at {record.place}",
                    found="no such column" + (f" (there is '{near[0]}')" if near else ""),
                    change=f"mend the record, or the entry's columns in {FILE}",
                )
        for name in ("conversations", "messages"):
            if isinstance(value.get(name), list):
                value[name] = [
                    self._turn(turn, f"turn {number} at {record.place}")
                    for number, turn in enumerate(value[name])
                ]
        return replace(record, value=value)

    def _turn(self, turn: Any, asked: str) -> dict[str, Any]:
        role, content = self.tags["role_tag"], self.tags["content_tag"]
        ours = OPENAI_TAGS if self.format == "messages" else TAGS
        names = {self.tags[f"{each}_tag"]: ours[f"{each}_tag"] for each in SPEAKERS}
        if not isinstance(turn, dict) or role not in turn:
            raise UserError(
                asked=asked,
                found=f"no '{role}' in it",
                change=f"mend the record, or role_tag in {FILE}",
            )
        if turn[role] not in names:
            raise UserError(
                asked=asked,
                found=f"{role} '{turn[role]}'",
                change=f"use one of {', '.join(names)}, or mend the entry's tags in {FILE}",
            )
        rest = {key: value for key, value in turn.items() if key not in (role, content)}
        return rest | {
            ours["role_tag"]: names[turn[role]],
            ours["content_tag"]: turn.get(content),
        }


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One entry, checked."""

    name: str
    fields: Mapping[str, Any]
    columns: _Columns
    hub: HubDataset | None

    @classmethod
    def of(cls, name: str, fields: Mapping[str, Any], asked: str) -> "_Entry":
        """Refuse what is not known or not done; nothing in an entry is ignored."""
        _check_fields(fields, asked)
        hub = None
        if HUB in fields:
            hub = HubDataset(
                name=fields[HUB],
                config=fields.get("subset"),
                split=fields.get("split", "train"),
            )
            if fields.get("folder"):
                raise UserError(
                    asked=f"{asked} with folder: {fields['folder']}",
                    found="a part of a repository",
                    change="download it and give file_name",
                )
        return cls(name=name, fields=fields, columns=_columns(fields, asked), hub=hub)


def _check_fields(fields: Mapping[str, Any], asked: str) -> None:
    for key, value in fields.items():
        if key in REFUSED and value not in (False, None):
            raise UserError(
                asked=f"{asked} with {key}: {value}",
                found="what is not done here",
                change=f"remove it: {REFUSED[key]}",
            )
        if key not in KNOWN and key not in REFUSED:
            raise _unknown(key, sorted(KNOWN), asked)
    if "file_name" not in fields and HUB not in fields:
        others = [key for key in ELSEWHERE if key in fields]
        raise UserError(
            asked=asked,
            found=f"{others[0]}, from which nothing is read here" if others else "no file_name",
            change=f"give file_name or {HUB}",
        )


def _columns(fields: Mapping[str, Any], asked: str) -> _Columns:
    formatting = fields.get("formatting", "alpaca")
    if formatting not in FORMATTING:
        raise UserError(
            asked=f"{asked} with formatting: {formatting}",
            found="no such formatting",
            change=f"use one of {', '.join(FORMATTING)}",
        )
    given = _texts(fields, "columns", asked)
    tags = _texts(fields, "tags", asked)
    for key in given:
        if key in OTHER_COLUMNS:
            raise UserError(
                asked=f"{asked} with the column '{key}'",
                found="what is not trained on here",
                change="use data of texts alone, without ranking",
            )
        if key not in (*ALPACA, *TURNS, *EXTRA):
            raise _unknown(key, [*ALPACA, *TURNS, *EXTRA], f"{asked}, columns")
    for key in tags:
        if key not in TAGS:
            raise _unknown(key, list(TAGS), f"{asked}, tags")
    extra = {key: given[key] for key in EXTRA if key in given}
    if formatting != "alpaca":
        chat = "messages" if formatting == "openai" else "conversations"
        return _Columns(
            format="messages" if formatting == "openai" else "sharegpt",
            columns={chat: given.get("messages", TURNS["messages"])} | extra,
            optional=frozenset(extra),
            tags=(OPENAI_TAGS if formatting == "openai" else TAGS) | tags,
        )
    roles = given.keys() & ALPACA.keys() if given else ALPACA.keys()
    if roles == {"prompt"}:  # as for pretraining
        columns = {"text": given["prompt"]}
        return _Columns(format="text", columns=columns, optional=frozenset(), tags={})
    if not {"prompt", "response"} <= roles:
        raise UserError(
            asked=f"columns of {asked}",
            found=f"no {'response' if 'prompt' in roles else 'prompt'} among them",
            change="name the columns of prompt and response; a prompt alone is a text",
        )
    return _Columns(
        format="alpaca",
        columns={ALPACA[key]: given.get(key, ALPACA[key]) for key in ALPACA if key in roles}
        | extra,
        optional=frozenset(extra if given else {"input"}),
        tags={},
    )


def _texts(fields: Mapping[str, Any], name: str, asked: str) -> dict[str, str]:
    found = fields.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise UserError(
            asked=f"{name} of {asked}", found="no object of texts", change='write {"KEY": "NAME"}'
        )
    return found


def _unknown(key: str, known: Sequence[str], asked: str) -> UserError:
    near = difflib.get_close_matches(key, known, n=1)
    return UserError(
        asked=f"'{key}' in {asked}",
        found="no such field" + (f" (there is '{near[0]}')" if near else ""),
        change=f"use {', '.join(known)}",
    )
