"""What can be known of files and directories before anything is loaded.

Promise: takes milliseconds and imports neither torch nor transformers, so that a mistyped path is
told at once.
"""

import os
import re
import tempfile
from pathlib import Path

from megatrain.data.names import DataNames, check_names
from megatrain.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`name` or `owner/name`; anything else can only be a path."""

LOG = "log.jsonl"
MANIFEST = "training_state/manifest.json"
TRACES_OF_A_RUN = (LOG, "config.json")


def check_run(
    *,
    model: str,
    gguf_file: str | None = None,
    tokenizer: str | None,
    train: DataNames,
    held_out: DataNames,
    output_dir: str,
    overwrite: bool,
    resume: bool | str | None = None,
    disk_path: str | None = None,
) -> None:
    """Check all paths of a training run.

    Raises:
        UserError: for a model, tokenizer or data that is not there, or a directory that cannot or
            should not be written.
    """
    if disk_path is not None:
        check_scratch(Path(disk_path))
    check_model(model, gguf_file, tokenizer=tokenizer)
    check_data(train, held_out)
    folder, _ = find_gguf(model, gguf_file)
    output = Path(output_dir)
    check_output(output, model=Path(folder))
    if not overwrite:
        _check_earlier_run(output, resume)


def check_data(train: DataNames, held_out: DataNames) -> None:
    """Check that data is there, as far as that is known without loading it.

    Raises:
        UserError: for a file, a registered name or a package that is not.
    """
    check_names(train)
    if held_out:
        check_names(held_out)


def find_gguf(model: str, gguf_file: str | None = None) -> tuple[str, str | None]:
    """The directory or id of a model, and the GGUF file in it that is meant, if any.

    Raises:
        UserError: if two are named.
    """
    if not model.endswith(".gguf") or Path(model).is_dir():
        return model, gguf_file
    if gguf_file is not None:
        raise UserError(
            asked=f"model_name_or_path: {model} with gguf_file: {gguf_file}",
            found="two GGUF files",
            change="leave gguf_file out",
        )
    return str(Path(model).parent), Path(model).name


def check_model(model: str, gguf_file: str | None = None, *, tokenizer: str | None = None) -> None:
    """Check that `model` is a model directory or a GGUF file, or can be the id of a model; and
    where another's tokenizer is to be used, that it can be there.

    Raises:
        UserError: if it is neither.
    """
    _check_model(model, gguf_file)
    if tokenizer is not None:
        _check_source(f"tokenizer_name: {tokenizer}", tokenizer, "a tokenizer's files")


def _check_model(model: str, gguf_file: str | None) -> None:
    asked, holds = f"model_name_or_path: {model}", "a Hugging Face model"
    folder, gguf_file = find_gguf(model, gguf_file)
    _check_source(asked, folder, holds)
    if not Path(folder).is_dir():
        return
    if gguf_file is not None:
        if not (Path(folder) / gguf_file).is_file():
            found = f"no file {Path(folder) / gguf_file}"
            raise UserError(asked=asked, found=found, change="name another")
    elif not (Path(folder) / "config.json").is_file():
        raise _not_there(asked, "no config.json there", holds)


def _check_source(asked: str, source: str, holds: str) -> None:
    """A directory, or what can be the id of a model."""
    if Path(source).is_dir():
        return
    if Path(source).exists():
        raise _not_there(asked, "a file, not a directory", holds)
    if HUB_ID.fullmatch(source) is None:
        raise _not_there(asked, "no such directory", holds)


def _not_there(asked: str, found: str, holds: str) -> UserError:
    change = f"give a directory that holds {holds}, or a model id"
    return UserError(asked=asked, found=found, change=change)


def _check_earlier_run(output: Path, resume: bool | str | None) -> None:
    """What is in `output` already must be what the run goes on from, or nothing.

    Raises:
        UserError: if it is not, or the checkpoint to go on from is not there.
    """
    resumes_here = resume is True or resume == "auto"
    if isinstance(resume, str) and not resumes_here:
        if not Path(resume).is_dir():
            raise UserError(
                asked=f"resume_from_checkpoint: {resume}",
                found="no such directory",
                change="give a checkpoint's directory, or auto",
            )
        # The checkpoint itself may be a link to another disk.
        resumes_here = Path(resume).absolute().parent.resolve() == output.resolve()
    checkpoints = sorted(path.name for path in output.glob("checkpoint-*"))
    strangers = [name for name in checkpoints if not (output / name / MANIFEST).is_file()]
    if resumes_here and strangers:
        raise UserError(
            asked=f"output_dir: {output}",
            found=f"{strangers[0]}, which is no checkpoint of megatrain (no {MANIFEST})",
            change="move it away; one of transformers' Trainer can be given as"
            " resume_from_checkpoint: PATH with another output_dir",
        )
    traces = [name for name in TRACES_OF_A_RUN if (output / name).exists()]
    if resumes_here:  # a run that was killed before its first checkpoint begins again
        holds = [] if checkpoints else [name for name in traces if name != LOG]
    else:
        holds = [*checkpoints[:1], *traces]
    if holds:
        raise UserError(
            asked=f"output_dir: {output}",
            found=f"an earlier run or model there ({', '.join(holds)})",
            change="choose another directory, set resume_from_checkpoint: auto to go on from its"
            " last checkpoint, or overwrite_output_dir: true",
        )


def check_output(output: Path, *, model: Path) -> None:
    """Check that a run may write to `output`.

    Raises:
        UserError: if it is a file, is the model itself, or cannot be written.
    """
    asked = f"output_dir: {output}"
    if output.exists() and not output.is_dir():
        raise UserError(asked=asked, found="a file of that name", change="choose a directory")
    if output.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UserError(
            asked=asked,
            found="the current directory or one above it",
            change="choose a directory of its own",
        )
    if output.resolve() in (model.resolve(), *model.resolve().parents) and model.exists():
        raise UserError(
            asked=asked,
            found="the directory of the model to start from, or one above it",
            change="choose another directory",
        )
    above = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not above.is_dir():
        raise UserError(asked=asked, found=f"a file at {above}", change="choose another directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(
            asked=asked, found=f"no right to write to {above}", change="choose another directory"
        )


def check_scratch(folder: Path) -> None:
    """Check that scratch space can be made in `folder`.  It is not created: a mistyped path, or a
    disk that is not mounted, would put the state on another disk.

    Raises:
        UserError: if it is no directory, or cannot be written.
    """
    asked, change = f"disk_path: {folder}", "give an existing directory on the disk to use"
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such directory"
        raise UserError(asked=asked, found=found, change=change)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(asked=asked, found="no right to write there", change=change)


def claim_file(key: str, path: Path) -> None:
    """Create an empty file for what is written during the run.

    Raises:
        UserError: if the system refuses it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise UserError(
            asked=f"{key}: {path}",
            found=f"no way to write there ({error.strerror})",
            change="choose another file",
        ) from error


def claim_output(output: Path) -> None:
    """Create the output directory, and see that files can be written there.

    Raises:
        UserError: if the system refuses either.
    """
    output = output.resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output) as file:
            file.write(b"0")
    except OSError as error:
        raise UserError(
            asked=f"output_dir: {output}",
            found=f"no way to write there ({error.strerror})",
            change="choose another directory",
        ) from error
