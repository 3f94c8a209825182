"""The command line: parse, call, print."""

import os
import platform
import sys
from importlib import metadata
from typing import Annotated

import typer
import yaml
from rich.console import Console

from megatrain.config import read_config
from megatrain.errors import UserError

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
        bool, typer.Option(help="Print the resolved config, then stop.")
    ] = False,
) -> None:
    """Train as CONFIG.yaml says; any key can be overridden: --key value, or key=value."""
    config, notices = read_config(config_path, context.args)
    for notice in notices:
        typer.echo(f"note: {notice}", err=True)
    if print_config:
        typer.echo(yaml.safe_dump(config.model_dump(), sort_keys=False), nl=False)
        return
    from megatrain.trainer import Trainer

    Trainer(config).train()


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Model directory.")],
    files: Annotated[list[str], typer.Argument(help="Data files, folders or globs.")],
    max_length: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = 8,
    prompt_column: Annotated[str, typer.Option(help="Column of the prompt.")] = "prompt",
    completion_column: Annotated[
        str, typer.Option(help="Column of the completion.")
    ] = "completion",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Print token-weighted loss and perplexity of a model on files, as one JSON line."""
    from megatrain.data import DataOptions
    from megatrain.trainer import describe, evaluate_model

    options = DataOptions(
        max_length=max_length, prompt_column=prompt_column, completion_column=completion_column
    )
    result = evaluate_model(model, files, options=options, batch_size=batch_size, device=device)
    typer.echo(describe(result))


@app.command()
def env() -> None:
    """Print versions and hardware, for bug reports."""
    import psutil
    import torch

    names = ["megatrain", "torch", "transformers", "tokenizers", "safetensors", "numba"]
    for name in names:
        typer.echo(f"{name} {metadata.version(name)}")
    memory = psutil.virtual_memory()
    typer.echo(f"python {platform.python_version()} on {platform.platform()}")
    typer.echo(f"{os.cpu_count()} cores, {memory.total / 2**30:.1f} GiB of memory")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    typer.echo(f"GPU {gpu}")


def main() -> None:
    """Entry point: a user's mistake becomes one line and exit status 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
