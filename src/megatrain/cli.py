"""The command line: parse, call, print."""

import os
import platform
import sys
from importlib import metadata
from typing import Annotated, Literal

import typer
import yaml
from rich.console import Console

from megatrain import __version__
from megatrain.config import read_config
from megatrain.data import DataOptions
from megatrain.data.files import find_files
from megatrain.errors import UserError
from megatrain.preflight import check_model, check_run
from megatrain.units import format_bytes

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
) -> None:
    """Train as CONFIG.yaml says; any key can be overridden: --key value, or key=value."""
    config, notices = read_config(config_path, context.args)
    for notice in notices:
        typer.echo(f"note: {notice}", err=True)
    if print_config:
        typer.echo(yaml.safe_dump(config.model_dump(), sort_keys=False), nl=False)
        return
    # Before torch is imported, so that a mistyped path is told at once.
    check_run(
        model=config.model_name_or_path,
        gguf_file=config.gguf_file,
        tokenizer=config.tokenizer_name,
        train_files=config.train_files,
        eval_files=config.eval_files,
        output_dir=config.output_dir,
        overwrite=config.overwrite_output_dir,
    )
    from megatrain.trainer import Trainer

    Trainer(config).train()


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Model directory, id, or GGUF file.")],
    files: Annotated[list[str], typer.Argument(help="Data files, folders or globs.")],
    max_length: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    dataset_format: Annotated[
        Literal["auto", "text", "prompt_completion", "messages"],
        typer.Option(help="Format of the records."),
    ] = "auto",
    prompt_column: Annotated[str, typer.Option(help="Column of the prompt.")] = "prompt",
    completion_column: Annotated[
        str, typer.Option(help="Column of the completion.")
    ] = "completion",
    completion_only_loss: Annotated[bool, typer.Option(help="Leave the prompt out.")] = True,
    assistant_only_loss: Annotated[
        bool, typer.Option(help="Take the assistant's turns only.")
    ] = True,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where blocks are computed.")
    ] = "auto",
    model_revision: Annotated[str | None, typer.Option(help="Revision of a model id.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="The Hub's cache.")] = None,
) -> None:
    """Print token-weighted loss and perplexity of a model on files, as one JSON line."""
    check_model(model)
    find_files(files)
    options = DataOptions(
        max_length=max_length,
        format=dataset_format,
        prompt_column=prompt_column,
        completion_column=completion_column,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    from megatrain.evaluator import describe, evaluate_model

    result = evaluate_model(
        model,
        files,
        options=options,
        batch_size=batch_size,
        device=device,
        revision=model_revision,
        cache_dir=cache_dir,
    )
    typer.echo(describe(result))


@app.command()
def env() -> None:
    """Print versions and hardware, for bug reports."""
    import psutil
    import torch

    typer.echo(f"megatrain {__version__}")
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numba", "numpy"):
        typer.echo(f"{name} {metadata.version(name)}")
    memory = psutil.virtual_memory()
    typer.echo(f"python {platform.python_version()} on {platform.platform()}")
    typer.echo(f"cores {os.cpu_count()}")
    typer.echo(f"memory {format_bytes(memory.total)}, {format_bytes(memory.available)} free")
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
