"""The command line: parse, call, print."""

import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from rich.console import Console

from megatrain import __version__
from megatrain.cli import planning, reading
from megatrain.cli.arguments import (
    Calibrate,
    ConfigOverrides,
    Device,
    DiskPath,
    ExpertParts,
    GpuMemory,
    Layers,
    MicroRows,
    Offload,
    Place,
    SameTokens,
    Shape,
    parse_config_overrides,
    parse_micro_rows,
    parse_offload,
    parse_size,
    with_option_names,
)
from megatrain.cli.calibrating import calibrate_here, check_calibrate
from megatrain.config import read_config
from megatrain.errors import UserError
from megatrain.monitor import PICTURE, plot_runs
from megatrain.preflight import check_data, check_model, check_run, check_scratch, claim_file
from megatrain.units import format_bytes
from megatrain.versions import library_versions

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Full-parameter training of language models larger than the GPU.",
)
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=ANYTHING)
def train(
    context: typer.Context,
    config_path: Annotated[str, typer.Argument(metavar="CONFIG.yaml")],
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config, then stop.")
    ] = False,
    recipe: Annotated[
        bool,
        typer.Option("--recipe", help="Print hyperparameters known for such a run, then stop."),
    ] = False,
) -> None:
    """Train as CONFIG.yaml says; any key can be overridden: --key value, or key=value."""
    config, notices = read_config(config_path, context.args)
    for notice in notices:
        typer.echo(f"note: {notice}", err=True)
    if print_config and recipe:
        raise UserError(
            asked="--print-config and --recipe",
            found="two things to print, each instead of training",
            change="give one of them",
        )
    if print_config:
        typer.echo(yaml.safe_dump(config.model_dump(), sort_keys=False), nl=False)
        return
    if recipe:
        check_model(config.model_name_or_path, config.gguf_file)
        from megatrain.trainer import advise

        for line in advise(config):
            typer.echo(line)
        return
    # Before torch is imported, so that a mistyped path is told at once.
    check_run(**config.paths())
    from megatrain.trainer import Trainer

    Trainer(config).train()


@app.command("preprocess", context_settings=ANYTHING)
def preprocess_data(
    context: typer.Context,
    config_path: Annotated[str, typer.Argument(metavar="CONFIG.yaml")],
    sample: Annotated[int, typer.Option(min=0, help="Row to show.")] = 0,
) -> None:
    """Tokenise the data of CONFIG.yaml and show what is trained on; overrides as for train."""
    config, notices = read_config(config_path, context.args)
    for notice in notices:
        typer.echo(f"note: {notice}", err=True)
    check_model(config.model_name_or_path, config.gguf_file)
    check_data(config.train_names(), config.eval_names())
    from megatrain.trainer import preprocess

    console = Console(soft_wrap=True, highlight=False)
    for part in preprocess(config, sample):
        console.print(part)


@app.command()
def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN_DIR...", help="Output directories.")],
    output: Annotated[str, typer.Option(help="The picture: .png, .svg, .pdf.")] = PICTURE,
) -> None:
    """Draw loss, learning rate, speed and gradient norm of runs, in one picture."""
    plot_runs([Path(run) for run in runs], Path(output))
    typer.echo(output)


@app.command()
def bench(
    context: typer.Context,
    model: Shape = None,
    calibrate: Calibrate = False,
    layers: Layers = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of an optimizer step.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 1024,
    micro_rows: MicroRows = "16",
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 10,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 3,
    same_tokens: SameTokens = False,
    max_grad_norm: Annotated[float, typer.Option(min=0, help="0 turns clipping off.")] = 1.0,
    gpu_memory: GpuMemory = None,
    host_memory: Annotated[str | None, typer.Option(help="The same for the host.")] = None,
    disk_path: DiskPath = None,
    disk_memory: Annotated[str | None, typer.Option(help="Room to use there.")] = None,
    place: Place = "auto",
    offload: Offload = None,
    config_overrides: ConfigOverrides = None,
    expert_parts: ExpertParts = None,
    compiled: Annotated[bool, typer.Option(help="Compile layers and loss, on a GPU.")] = True,
    device: Device = "auto",
    trace: Annotated[str | None, typer.Option(help="Write a trace of one more step.")] = None,
    output: Annotated[str | None, typer.Option(help="Append the figures as a JSON line.")] = None,
) -> None:
    """Measure training steps of a model's shape, on random weights and tokens."""
    check_calibrate(context)
    if model is None:
        calibrate_here(disk_path)
        return
    check_model(model)
    _check_paths(disk_path, disk_memory, trace=trace, output=output)
    from megatrain.bencher import BenchOptions, append_row, run_bench, table

    options = BenchOptions(
        model=model,
        layers=layers,
        rows=rows,
        length=length,
        micro_rows=parse_micro_rows(micro_rows),
        steps=steps,
        warmup_steps=warmup_steps,
        same_tokens=same_tokens,
        max_grad_norm=max_grad_norm,
        gpu_memory=parse_size("gpu_memory", gpu_memory),
        host_memory=parse_size("host_memory", host_memory),
        disk_path=None if disk_path is None else Path(disk_path),
        disk_memory=parse_size("disk_memory", disk_memory),
        place=place,
        offload=parse_offload(offload),
        config_overrides=parse_config_overrides(config_overrides),
        expert_parts=expert_parts,
        device=device,
        compile=compiled,
        trace=None if trace is None else Path(trace),
    )
    row = run_bench(options, typer.echo) | {"megatrain": __version__}
    typer.echo(table(row))
    if output is not None:
        append_row(Path(output), row)


def _check_paths(disk_path: str | None, disk_memory: str | None, **files: str | None) -> None:
    if disk_path is not None:
        check_scratch(Path(disk_path))
    elif disk_memory is not None:
        raise UserError(asked="--disk-memory", found="no disk", change="give --disk-path too")
    for key, path in files.items():
        if path is not None and not Path(path).exists():
            claim_file(key, Path(path))


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="Checkpoint or model directory.")],
    target: Annotated[str, typer.Argument(help="Directory to make.")],
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of the weights; auto: as in the source's config."),
    ] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest weights file.")] = "5GB",
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this repository.")
    ] = None,
    private: Annotated[bool, typer.Option(help="Of a new repository.")] = False,
) -> None:
    """Write a plain Hugging Face model directory from the masters of a checkpoint."""
    check_model(source)
    max_shard_bytes = parse_size("max_shard_size", max_shard_size)
    assert max_shard_bytes is not None
    from megatrain.exporter import export_model

    written = export_model(
        Path(source),
        Path(target),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        push_to_hub=push_to_hub,
        private=private,
    )
    typer.echo(f"{target}: {written}")


app.command()(planning.plan)
app.command("eval")(with_option_names(reading.evaluate))
app.command("lm-eval")(with_option_names(reading.evaluate_on_tasks))
app.command("generate")(with_option_names(reading.generate_text))
app.command("chat")(with_option_names(reading.converse))


@app.command()
def env() -> None:
    """Print versions and hardware, for bug reports."""
    import psutil
    import torch

    from megatrain.planner import host_memory

    typer.echo(f"megatrain {__version__}")
    for name, version in library_versions().items():
        typer.echo(f"{name} {version}")
    memory, there = psutil.virtual_memory(), host_memory()
    typer.echo(f"python {platform.python_version()} on {platform.platform()}")
    typer.echo(f"cores {os.cpu_count()}")
    left = f"{format_bytes(there.nbytes)} {there.in_words()}"
    typer.echo(f"memory {format_bytes(memory.total)}, of which {left}")
    if not torch.cuda.is_available():
        typer.echo("GPU none")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        typer.echo(f"GPU {index} {device.name}, {format_bytes(device.total_memory)}")


def main() -> None:
    """Entry point: a user's mistake becomes one line and exit status 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
