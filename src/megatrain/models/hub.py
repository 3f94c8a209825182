"""A model id as a directory: what is needed of it, from the Hub or its cache.

Promise: config, tokenizer and weights come from one commit, and only these are downloaded: no
second copy of the weights in another format.  HF_HUB_OFFLINE, HF_HUB_CACHE and the other variables
of huggingface_hub are honoured, by huggingface_hub itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from megatrain.errors import UserError
from megatrain.models.source import checkpoint_files, weight_names

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Config, tokenizer, chat template and the index of the weights."""
IN_FOLDERS = ("*/*",)
"""Files below the top: the same weights once more, for other programs."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Where a model's files are."""

    name: str
    """As the user gave it: a directory or an id."""
    directory: Path
    """Holds config and tokenizer; of an id: the snapshot of one commit."""
    gguf_file: str | None = None
    """The file in it that holds config, tokenizer and weights in one."""
    cache_dir: str | None = None

    @property
    def weights(self) -> Path:
        """The directory, or the GGUF file."""
        return self.directory if self.gguf_file is None else self.directory / self.gguf_file

    def fetch_weights(self) -> list[Path]:
        """The weights, of the same commit as config and tokenizer.

        Raises:
            UserError: if there are no weights that can be read, or they cannot be fetched.
        """
        if self.gguf_file is None and not Path(self.name).is_dir():
            names = weight_names(self.directory)
            _snapshot(self.name, self.directory.name, self.cache_dir, names)
        return checkpoint_files(self.weights)


def find_model(
    name: str,
    *,
    key: str = "model_name_or_path",
    gguf_file: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
) -> ModelFiles:
    """A model's files; of an id everything but the weights is fetched (but all of a GGUF file).

    Args:
        name: a directory, or the id of a model.
        key: the option that names it, for errors.
        gguf_file: name of a GGUF file in it.
        revision: branch, tag or commit of a model id.
        cache_dir: the Hub's cache, if it is not at its usual place.

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
        return ModelFiles(name=name, directory=Path(name), gguf_file=gguf_file)
    patterns = [*TEXT_FILES, *([gguf_file] if gguf_file else ())]
    directory = _snapshot(name, revision, cache_dir, patterns, key=key)
    return ModelFiles(name=name, directory=directory, gguf_file=gguf_file, cache_dir=cache_dir)


def upload_model(folder: Path, name: str, *, private: bool) -> None:
    """Upload a model directory to a repository on the Hub, which is made if it is not there.

    Args:
        folder: everything in it is uploaded.
        name: `owner/name`.
        private: of a repository that is new.

    Raises:
        UserError: without a network, a token or the right to write there.
    """
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name)
    except (OSError, ValueError) as error:
        found = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            asked=f"upload {folder} to {name}",
            found=found,
            change="log in (hf auth login), go online, or upload the directory later",
        ) from error


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
