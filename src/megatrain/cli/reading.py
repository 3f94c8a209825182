"""The commands that read a model: eval, lm-eval, generate, chat."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatrain.cli.arguments import (
    CacheDir,
    Device,
    Dtype,
    GpuMemory,
    MaxNewTokens,
    Model,
    Revision,
    Seed,
    Temperature,
    TopK,
    TopP,
    parse_size,
)
from megatrain.data import DataOptions, TokenCache, default_cache_dir
from megatrain.data.files import find_files
from megatrain.errors import UserError
from megatrain.preflight import check_model, claim_file

if TYPE_CHECKING:
    from megatrain.opening import ModelChoice


def evaluate(
    model: Model,
    files: Annotated[list[str], typer.Argument(help="Data files, folders or globs.")],
    max_length: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    dataset_format: Annotated[
        Literal["auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca", "tokens"],
        typer.Option(help="Format of the records."),
    ] = "auto",
    prompt_column: Annotated[str, typer.Option(help="Column of the prompt.")] = "prompt",
    completion_column: Annotated[
        str, typer.Option(help="Column of the completion.")
    ] = "completion",
    dataset_text_field: Annotated[str, typer.Option(help="Column of a text.")] = "text",
    completion_only_loss: Annotated[bool, typer.Option(help="Leave the prompt out.")] = True,
    assistant_only_loss: Annotated[
        bool, typer.Option(help="Take the assistant's turns only.")
    ] = True,
    dataset_cache_dir: Annotated[
        str | None, typer.Option(help="Where tokenised rows are kept; default: as for train.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    gpu_memory: GpuMemory = None,
    model_revision: Revision = None,
    cache_dir: CacheDir = None,
) -> None:
    """Print loss, perplexity and bits per byte on files: a JSON line each, and the total."""
    check_model(model)
    find_files(files)
    options = DataOptions(
        max_length=max_length,
        format=dataset_format,
        prompt_column=prompt_column,
        completion_column=completion_column,
        text_column=dataset_text_field,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    from megatrain.evaluator import describe, evaluate_model

    choice = _choice(model, device, dtype, gpu_memory, model_revision, cache_dir)
    cache = TokenCache(
        dataset_cache_dir or default_cache_dir(), lambda note: typer.echo(note, err=True)
    )
    results = evaluate_model(choice, files, options=options, batch_size=batch_size, cache=cache)
    for line in describe(results):
        typer.echo(line)


def evaluate_on_tasks(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Tasks, groups or tags: NAME,NAME; * matches.")],
    include_path: Annotated[
        list[str] | None, typer.Option(help="Folder with task files of your own.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt.")] = None,
    limit: Annotated[
        float | None, typer.Option(min=0, help="Samples of a task; below 1 a share of them.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row; default: the model's.")
    ] = None,
    apply_chat_template: Annotated[bool, typer.Option(help="Ask as in a chat.")] = False,
    system_instruction: Annotated[str | None, typer.Option(help="Goes before the prompt.")] = None,
    output: Annotated[str | None, typer.Option(help="Write lm_eval's results as JSON.")] = None,
    log_samples: Annotated[bool, typer.Option(help="Every sample too; needs --output.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    gpu_memory: GpuMemory = None,
    model_revision: Revision = None,
    cache_dir: CacheDir = None,
) -> None:
    """Score on tasks of EleutherAI's lm-evaluation-harness: a JSON line for each task."""
    check_model(model)
    if output is not None and not Path(output).exists():
        claim_file("output", Path(output))
    if output is None and log_samples:
        raise UserError(asked="log_samples", found="no output", change="give --output FILE.json")
    from megatrain.evaluation.harness import HarnessOptions
    from megatrain.evaluator import describe_tasks, evaluate_tasks, write_results

    options = HarnessOptions(
        tasks=[name.strip() for name in tasks.split(",")],
        include_path=include_path or (),
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        max_length=max_length,
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        log_samples=log_samples,
    )
    choice = _choice(model, device, dtype, gpu_memory, model_revision, cache_dir)
    results = evaluate_tasks(choice, options)
    for line in describe_tasks(results):
        typer.echo(line)
    if output is not None:
        write_results(Path(output), results)


def generate_text(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Files of prompts, in place of --prompt.")
    ] = None,
    prompt_column: Annotated[str, typer.Option(help="Their column.")] = "prompt",
    apply_chat_template: Annotated[bool, typer.Option(help="Take texts as a user's turn.")] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
    gpu_memory: GpuMemory = None,
    model_revision: Revision = None,
    cache_dir: CacheDir = None,
) -> None:
    """Go on from a prompt: print the text as it comes, or for --prompts a JSON line each."""
    from megatrain.data.prompts import Prompt, read_prompts

    check_model(model)
    if (prompt is None) == (not prompts):
        raise UserError(
            asked="generate", found="neither or both of --prompt and --prompts", change="give one"
        )
    found = [Prompt(value=prompt, place="--prompt")] if prompt is not None else []
    found += read_prompts(prompts, prompt_column) if prompts else []
    if apply_chat_template:
        found = [each.as_chat() for each in found]
    from megatrain.evaluation.generation import Decoding
    from megatrain.generator import generate

    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    choice = _choice(model, device, dtype, gpu_memory, model_revision, cache_dir)
    write = None if prompts else _write
    for done in generate(choice, found, decoding, batch_size=batch_size, write=write):
        typer.echo(done.describe() if prompts else "")


def converse(
    model: Model,
    system: Annotated[str | None, typer.Option(help="Goes before the first turn.")] = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    gpu_memory: GpuMemory = None,
    model_revision: Revision = None,
    cache_dir: CacheDir = None,
) -> None:
    """Talk with a model, a line a turn; an empty line or the end of input (Ctrl-D) ends it."""
    check_model(model)
    from megatrain.evaluation.generation import Decoding
    from megatrain.generator import chat

    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    choice = _choice(model, device, dtype, gpu_memory, model_revision, cache_dir)
    chat(choice, decoding, system=system, read=_read_turn, write=_write)


def _read_turn() -> str | None:
    """A line of the user's; its end is the assistant's turn."""
    typer.echo("> ", nl=False, err=True)
    return sys.stdin.readline().strip() or None


def _write(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _choice(
    model: str,
    device: str,
    dtype: str,
    gpu_memory: str | None,
    revision: str | None,
    cache_dir: str | None,
) -> "ModelChoice":
    from megatrain.opening import ModelChoice

    return ModelChoice(
        path=model,
        device=device,
        dtype=dtype,
        gpu_memory=parse_size("gpu_memory", gpu_memory),
        revision=revision,
        cache_dir=cache_dir,
    )
