"""From a YAML file and a command line to checked options.

Promise: every mistake is one `UserError` that names the key, and every key that was translated or
is met by design is reported.  Nothing heavy is imported.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatrain.config.foreign import MET, REFUSED, SYNONYMS
from megatrain.config.mistakes import nearest_key
from megatrain.config.options import TrainConfig
from megatrain.errors import UserError

SIZES = ("max_shard_size", "host_memory", "disk_memory", "gpu_memory", "checkpoint_memory")
"""Keys whose value may be a plain number of bytes."""
WITH_COMMAS = ("add_tokens", "add_special_tokens", "dataset", "eval_dataset")
"""Keys whose value may be a list with commas, as LLaMA-Factory has it."""
WITH_WEIGHTS = ("train_files", "dataset")
"""Keys whose value may be names with weights."""
WITHOUT_GPU = ("use_cpu", "no_cuda")
"""Names that transformers has, or had, for device: cpu."""
STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand once only; plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                problem = "twice" if isinstance(key, Hashable) else "and is no text"
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands there {problem}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig, list[str]]:
    """Read a YAML file and apply overrides.

    Args:
        path: the file.
        overrides: `--key value` pairs and `key=value` items, as typed; values are YAML.

    Returns:
        The config, and notices about keys that were translated or are met by design.

    Raises:
        UserError: for a missing or malformed file, an unknown or refused key, a wrong type.
    """
    in_file, notices = translate(_load(Path(path)))
    typed, more = translate(parse_overrides(overrides))
    config, last = make_config({**in_file, **typed})
    return config, list(dict.fromkeys([*notices, *more, *last]))


def _load(file: Path) -> dict[str, Any]:
    asked = f"config {file}"
    try:
        loaded = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UserError(
            asked=asked, found=str(error.strerror), change="give a readable YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(asked=asked, found=_one_line(error), change="mend the YAML") from error
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(asked=asked, found="no keys", change="write lines of `key: value`")
    for key in loaded:
        if not isinstance(key, str):
            raise UserError(
                asked=asked, found=f"the key {key!r}, which is not text", change="mend the YAML"
            )
    return loaded


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value` and `key=value` to a dictionary; the last of a key counts.

    Raises:
        UserError: for anything else.
    """
    found: dict[str, Any] = {}
    rest = list(items)
    while rest:
        item = rest.pop(0)
        key, equals, text = item.removeprefix("--").partition("=")
        if not equals:
            if not item.startswith("--") or not rest or rest[0].startswith("--"):
                raise UserError(
                    asked=f"override '{item}'",
                    found="no value",
                    change="write --key value or key=value",
                )
            text = rest.pop(0)
        key = key.replace("-", "_")
        try:
            found[key] = yaml.load(text, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            raise UserError(
                asked=f"override '{key}={text}'",
                found=_one_line(error),
                change="write the value as YAML, quoted for the shell",
            ) from error
    return found


def translate(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same options under their names here, and a notice about each that had another name.

    Raises:
        UserError: if two keys say the same thing, or a share is none.
    """
    named: dict[str, Any] = {}
    source: dict[str, str] = {}
    notices = []
    for key, value in values.items():
        name = SYNONYMS.get(key, key)
        if name in source:
            raise UserError(
                asked=f"{source[name]} and {key}",
                found=f"two keys that both mean {name}",
                change="keep one of them",
            )
        if key == "warmup_ratio" and isinstance(value, int | float) and not 0 <= value < 1:
            raise UserError(
                asked=f"warmup_ratio: {value}",
                found="no share of the steps",
                change="give a number from 0 to below 1, or use warmup_steps",
            )
        if name != key:
            notices.append(f"{key} is taken as {name}")
        named[name], source[name] = value, key
    return named, notices


def make_config(values: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """Check keys and types.

    Returns:
        The config, and notices about keys that were translated or are met by design.

    Raises:
        UserError: for an unknown or refused key, or with a part for each wrong type.
    """
    named, notices = translate(values)
    known = {}
    for key, value in named.items():
        if key in TrainConfig.model_fields:
            known[key] = _fit_type(key, value)
        else:
            _check_foreign(key, value)
            if key in MET:
                notices.append(f"{key}: {MET[key].why}")
    if named.get("bf16") is True and named.get("dtype") == "float32":
        raise UserError(
            asked="bf16: true with dtype: float32", found="a contradiction", change="remove one"
        )
    for key in WITHOUT_GPU:
        if named.get(key) is True:
            if known.get("device", "auto") not in ("auto", "cpu"):
                raise UserError(
                    asked=f"{key}: true with device: {known['device']}",
                    found="a contradiction",
                    change="remove one",
                )
            known["device"] = "cpu"
    return TrainConfig(**known), notices


def _check_foreign(key: str, value: Any) -> None:
    entry = MET.get(key) or REFUSED.get(key)
    if entry is None:
        nearest = nearest_key(key, TrainConfig.model_fields)
        raise UserError(
            asked=f"key '{key}'",
            found="no such key",
            change=f"did you mean '{nearest}'" if nearest else "see docs/config.md",
        )
    if not entry.accepts(value):
        change = f"remove {key}"
        if key in MET:
            taken = ", ".join(str(each) for each in entry.accepted or ())
            change += f", or set it to one of: {taken}"
        raise UserError(asked=f"{key}: {value}", found=entry.why, change=change)


def _fit_type(name: str, value: Any) -> Any:
    """YAML reads 1 where a float is meant and `1e-5` as text; one file may stand for a list."""
    annotation = TrainConfig.model_fields[name].annotation
    if annotation in (float, float | None):
        return _float(value)
    if name in WITH_COMMAS and isinstance(value, str):
        return [each.strip() for each in value.split(",")]
    if isinstance(value, str) and (annotation == list[str] or name in WITH_WEIGHTS):
        return [value]
    if name in WITH_WEIGHTS and isinstance(value, dict):
        return {key: _float(weight) for key, weight in value.items()}
    if annotation == dict[str, Any]:
        return _numbers(_pairs(value) if isinstance(value, str) else value)
    if name == "report_to":
        named = [value] if isinstance(value, str) else value
        return [] if named in (None, ["none"]) else named
    if name in STRATEGIES and value is False:
        return "no"  # which YAML takes for false
    if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _float(value: Any) -> Any:
    """The number that is meant; what is none is left."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if type(value) is int else value


def _numbers(value: Any) -> Any:
    """The same with texts such as `1e-5`, which YAML takes for text, as numbers."""
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value


def _pairs(text: str) -> dict[str, Any] | str:
    """`a=1,b=2`, as Hugging Face's run_clm has it; values are YAML. Anything else is left."""
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        return text
    try:
        return {key.strip(): yaml.load(value, Loader=_StrictLoader) for key, _, value in pairs}
    except yaml.YAMLError:
        return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
