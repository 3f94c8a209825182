"""A model id as a directory: what is needed of it, from the Hub or its cache.

Promise: config, tokenizer and weights come from one commit, and only these are downloaded: no
second copy of the weights in another format.  HF_HUB_OFFLINE, HF_HUB_CACHE and the other variables
of huggingface_hub are honoured, by huggingface_hub itself.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from megatrain.errors import UserError
from megatrain.models.weights import checkpoint_files, weight_names

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Config, tokenizer, chat template and the index of the weights."""
CODE_FILES = ("*.py",)
IN_FOLDERS = ("*/*",)
"""Files below the top: the same weights once more, for other programs."""


def model_directory(
    name: str,
    *,
    key: str = "model_name_or_path",
    revision: str | None = None,
    cache_dir: str | None = None,
    code: bool = False,
) -> Path:
    """The directory of a model, with its config and tokenizer but not yet its weights.

    Args:
        name: a directory, or the id of a model.
        key: the option that names it, for errors.
        revision: branch, tag or commit of a model id.
        cache_dir: the Hub's cache, if it is not at its usual place.
        code: fetch the Python files too.

    Raises:
        UserError: if there is no such model, here or there.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise UserError(
                asked=f"model_revision: {revision}",
                found=f"{name} is a directory, which has no revisions",
                change="remove model_revision, or give a model id",
            )
        return Path(name)
    patterns = [*TEXT_FILES, *(CODE_FILES if code else ())]
    return _snapshot(name, revision, cache_dir, patterns, key=key)


def fetch_weights(name: str, directory: Path, *, cache_dir: str | None = None) -> list[Path]:
    """The weights of a model whose directory is known, of the same commit.

    Args:
        name: as given to `model_directory`.
        directory: as returned by it.
        cache_dir: as given to it.

    Raises:
        UserError: if there are no safetensors weights, or they cannot be fetched.
    """
    if not Path(name).is_dir():
        _snapshot(name, directory.name, cache_dir, weight_names(directory))
    return checkpoint_files(directory)


def _snapshot(
    name: str,
    revision: str | None,
    cache_dir: str | None,
    patterns: Sequence[str],
    *,
    key: str = "model_name_or_path",
) -> Path:
    fetch = partial(
        snapshot_download,
        name,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=list(patterns),
        ignore_patterns=list(IN_FOLDERS),
    )
    try:
        try:
            return Path(fetch())
        except OfflineModeIsEnabled:  # huggingface_hub 1 asks the network for a commit's files
            return Path(fetch(local_files_only=True))
    except (OSError, ValueError) as error:
        found = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        where = "" if revision is None else f" at revision {revision}"
        raise UserError(
            asked=f"{key}: {name}{where}",
            found=f"no such directory, and no such model id ({found})",
            change="check the name and model_revision, go online once, or give a directory",
        ) from error
