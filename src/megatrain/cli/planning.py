"""`megatrain plan`, of a model or of a training config."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from megatrain.cli.arguments import Offload, parse_micro_rows, parse_offload, parse_size
from megatrain.config import TrainConfig, read_config
from megatrain.errors import UserError
from megatrain.preflight import check_model, check_scratch

DEFAULTS: dict[str, Any] = {
    "rows": 32,
    "length": 1024,
    "micro_rows": 16,
    "max_grad_norm": 1.0,
    "offload": {},
    "tokens": 1e9,
    "blocks": None,
    "gpu_memory": None,
    "host_memory": None,
    "disk_memory": None,
    "disk_path": None,
}
"""Of a plan of a model, which has all of the GPU and no disk."""

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_CONFIG",
        help="Directory with a config.json, or a model id; or the CONFIG.yaml of train.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Of a CONFIG.yaml, as train takes them."),
]
Rows = Annotated[int | None, typer.Option(min=1, help="Rows of an optimizer step; default: 32.")]
Length = Annotated[int | None, typer.Option(min=2, help="Tokens of a row; default: 1024.")]
MicroRows = Annotated[
    str | None,
    typer.Option(help="Rows of a micro-batch; auto: what suits this GPU best; default: 16."),
]
MaxGradNorm = Annotated[float | None, typer.Option(min=0, help="0 turns clipping off; default: 1.")]
GpuName = Annotated[
    str | None,
    typer.Option(help="Such as H100 or RTX 4090, or all; default: the one in this machine."),
]
HostBandwidth = Annotated[
    str | None,
    typer.Option(help="What the host's memory copies in a second, such as 100GB."),
]
DiskRate = Annotated[
    str | None,
    typer.Option(help="What it reads and writes in a second, both at once, such as 3GB."),
]


def plan(
    model: Source,
    overrides: Overrides = None,
    rows: Rows = None,
    length: Length = None,
    micro_rows: MicroRows = None,
    max_grad_norm: MaxGradNorm = None,
    gpu: GpuName = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of the GPU, such as 24GiB.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of the host; default: what is free here.")
    ] = None,
    host_bandwidth: HostBandwidth = None,
    disk_memory: Annotated[
        str | None, typer.Option(help="Of a disk, for layers that the host has no room for.")
    ] = None,
    disk_rate: DiskRate = None,
    offload: Offload = None,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Of the whole run; default: 1e9.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a model fits a machine, and how fast it would train there.

    Of a CONFIG.yaml: whether that run does; an option given here goes before its key.
    """
    sizes = {"gpu_memory": gpu_memory, "host_memory": host_memory, "disk_memory": disk_memory}
    given: dict[str, Any] = {
        "rows": rows,
        "length": length,
        "max_grad_norm": max_grad_norm,
        "offload": None if offload is None else parse_offload(offload),
        "tokens": tokens,
        **{name: parse_size(name, text) for name, text in sizes.items()},
    }
    bandwidth = parse_size("host_bandwidth", host_bandwidth)
    options = {name: value for name, value in given.items() if value is not None}
    if micro_rows is not None:
        options["micro_rows"] = parse_micro_rows(micro_rows)
    if _is_config(model):
        asked = _of_config(model, overrides or [], options, gpu)
    else:
        asked = _of_model(model, overrides or [], options)
    from megatrain.adviser import GivenRates, plan_run_of

    fits = plan_run_of(
        gpu=gpu,
        rates=GivenRates(host_bandwidth=bandwidth, disk=parse_size("disk_rate", disk_rate)),
        as_json=as_json,
        say=typer.echo,
        note=partial(typer.echo, err=True),
        **asked,
    )
    if not fits:
        raise typer.Exit(1)


def _is_config(source: str) -> bool:
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return not path.is_dir()
    return path.is_file() and path.suffix not in (".gguf", ".json")  # for check_model to refuse


def _of_model(model: str, overrides: list[str], given: dict[str, Any]) -> dict[str, Any]:
    check_model(model)
    if overrides:
        raise UserError(
            asked=f"{overrides[0]} beside the model {model}",
            found="no config, whose keys could be set",
            change="give a CONFIG.yaml, or options such as --rows",
        )
    from megatrain.adviser import Training

    return DEFAULTS | {"model": model, "training": Training()} | given


def _of_config(
    path: str, overrides: list[str], given: dict[str, Any], gpu: str | None
) -> dict[str, Any]:
    """What the file says, and over it what is given.

    Raises:
        UserError: as `train` has it.
    """
    config, notices = read_config(path, overrides)
    _check_machine(config, given, gpu)
    from megatrain.adviser import Training
    from megatrain.trainer import planned_run

    run = planned_run(config)
    engine = run.options
    if "micro_rows" in given:
        engine = replace(engine, micro_batch_tokens=None)
    asked: dict[str, Any] = {
        "model": config.model_name_or_path,
        "blocks": run.model,
        "rows": config.rows_per_step(given.get("length", run.length)),
        "length": run.length,
        # None: the planner chooses, here as for train.
        "micro_rows": None
        if config.micro_batch_tokens == "auto"
        else config.per_device_train_batch_size,
        "max_grad_norm": config.max_grad_norm,
        "gpu_memory": parse_size("gpu_memory", config.gpu_memory),
        "host_memory": parse_size("host_memory", config.host_memory),
        "disk_memory": None if "disk_memory" in given else run.disk_memory,
        "disk_path": config.disk_path,
        "offload": config.offload,
        "training": Training(
            engine=engine,
            expert_parts=config.expert_parts,
            checkpoint_memory=run.checkpoint_memory,
            checkpoint_bytes=run.checkpoint_bytes,
        ),
    }
    asked |= given
    if "tokens" not in given:
        step = asked["rows"] * asked["length"]
        asked["tokens"] = config.max_steps * step if config.max_steps > 0 else DEFAULTS["tokens"]
    for notice in [*notices, *_notes(config, asked, given)]:
        typer.echo(f"note: {notice}", err=True)
    return asked


def _check_machine(config: TrainConfig, given: dict[str, Any], gpu: str | None) -> None:
    """The model, and what is asked of the machine."""
    if config.device == "cpu" and gpu is None:
        raise UserError(
            asked="a plan of a run with device: cpu",
            found="no GPU in it, and plans are of GPUs",
            change="name one with --gpu",
        )
    check_model(config.model_name_or_path, config.gguf_file, tokenizer=config.tokenizer_name)
    if config.disk_path is not None and config.disk_memory is None and "disk_memory" not in given:
        check_scratch(Path(config.disk_path))


def _notes(config: TrainConfig, asked: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """What a reader of the plan should know."""
    length = asked["length"]
    if "length" not in given and not config.packing:
        yield (
            f"every row is taken to have {length} tokens (max_length), the most it can have;"
            " --length says what yours have"
        )
        if config.tokens_per_step is not None and "rows" not in given:
            yield f"tokens_per_step is {asked['rows']} rows of {length} tokens; shorter, more"
    if "tokens" not in given and config.max_steps <= 0:
        yield "how many tokens num_train_epochs has is not known without the data; see --tokens"
    if config.dtype == "float32":
        yield "times are those of bfloat16; in float32 a step takes longer"
