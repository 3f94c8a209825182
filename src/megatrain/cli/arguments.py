"""Arguments and options that several commands have."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from megatrain.config.read import parse_overrides
from megatrain.errors import UserError
from megatrain.units import parse_bytes

Model = Annotated[str, typer.Argument(help="Model directory, id, or GGUF file.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where blocks are computed.")]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="auto: bfloat16 on a GPU, float32 on the CPU."),
]
GpuMemory = Annotated[
    str | None, typer.Option(help="GPU memory to use, such as 24GiB; default: what is free.")
]
Offload = Annotated[
    str | None,
    typer.Option(help="What to put where, as in the config, such as '{resident: 2, saved: 1}'."),
]
ConfigOverrides = Annotated[
    str | None,
    typer.Option(help="Values of the model's config to change, such as '{sliding_window: 512}'."),
]
Revision = Annotated[str | None, typer.Option(help="Revision of a model id.")]
CacheDir = Annotated[str | None, typer.Option(help="The Hub's cache.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="0: greedy; above 0: drawn.")]
TopP = Annotated[float | None, typer.Option(help="Draw from this much probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many tokens; 0: from all.")]
Seed = Annotated[int, typer.Option(help="Of what is drawn.")]


def with_option_names(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, whose errors name its options where the rooms name keys of a config."""
    options = [
        name
        for name, parameter in inspect.signature(command).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    ]
    # A name of one word may be a word of the text, unless a value follows.
    names = "|".join(name if "_" in name else f"{name}(?=: )" for name in options)
    key = re.compile(rf"(?<![\w.'-])({names})(?!\w)(: (?:(true|false)\b)?)?")

    def option(found: re.Match[str]) -> str:
        name, value, flag = found.groups()
        no = "no-" if flag == "false" else ""
        return f"--{no}{name.replace('_', '-')}{' ' if value and not flag else ''}"

    @wraps(command)
    def told(*arguments: Any, **given: Any) -> None:
        try:
            command(*arguments, **given)
        except UserError as error:
            asked, found, change = (
                key.sub(option, text) for text in (error.asked, error.found, error.change)
            )
            raise UserError(asked=asked, found=found, change=change) from error

    return told


def parse_size(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(asked=name, found=str(error), change="give a size such as 24GiB") from error


def _parse_mapping(name: str, text: str | None, *, example: str) -> dict[str, Any]:
    """A mapping as in the config; empty where nothing is said.

    Raises:
        UserError: if it is none.
    """
    if text is None:
        return {}
    found = parse_overrides([f"{name}={text}"])[name]
    if not isinstance(found, dict):
        raise UserError(asked=f"{name}: {text}", found="no mapping", change=f"write '{example}'")
    return found


def parse_offload(text: str | None) -> dict[str, Any]:
    """What to put where; see `_parse_mapping`."""
    return _parse_mapping("offload", text, example="{resident: 2, saved: 1}")


def parse_config_overrides(text: str | None) -> dict[str, Any]:
    """What to change of a model's config; see `_parse_mapping`."""
    return _parse_mapping("config_overrides", text, example="{sliding_window: 512}")


def parse_micro_rows(text: str) -> int | None:
    """A number from 1; None for auto.

    Raises:
        UserError: for anything else.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            asked=f"--micro-rows {text}",
            found="no such number of rows",
            change="use auto, or 1, 2 ...",
        )
    return int(text)


MicroRows = Annotated[
    str, typer.Option(help="Rows of a micro-batch; auto: what suits this machine best.")
]
ExpertParts = Annotated[
    int | None,
    typer.Option(min=1, help="Stream a layer's experts in so many blocks; default: as needed."),
]
Shape = Annotated[
    str | None, typer.Argument(help="Directory with a config.json; no weights needed.")
]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many layers, if all do not fit.")
]
SameTokens = Annotated[
    bool, typer.Option("--same-tokens", help="The same in every step: the loss has to fall.")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine's rates and keep them.")
]
DiskPath = Annotated[
    str | None,
    typer.Option(help="Directory for layers that the host has no room for, or to calibrate."),
]
Place = Annotated[
    Literal["auto", "host", "device"],
    typer.Option(help="host: stream everything; device: all state on the GPU."),
]
