"""Tokenised rows kept on the disk between runs, so that data is tokenised once.

An entry is a folder named by a digest of everything that its rows depend on: the content of the
files, the tokenizer's files and chat template, the options, the code of this room and the versions
of the libraries it renders and tokenises with.  Content and not names or times, so that a file that
was moved, copied or touched is found again, and one that was changed never is.  So that a large
file is not read at every start, its digest is remembered beside its size, inode and times; the
change time cannot be set back by a user.

Promise: an entry appears whole or not at all, whoever else is writing the same one.  Its files are
taken as they are while their sizes and times are those of the writing; otherwise they are read and
compared with the digest, and what differs is made again.  What was not opened for 30 days is
removed when an entry is made (`data/expiry.py`).  A folder that cannot be written costs a
notice and memory, never the run.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from megatrain.data.expiry import MANIFEST, clean, put_away, touch, unfinished
from megatrain.data.files import kind_of, unreadable
from megatrain.data.formats import DataOptions
from megatrain.data.gather import (
    FILES,
    READ_BYTES,
    Gathered,
    GatheredFiles,
    digest_of_files,
    mapped_rows,
)
from megatrain.data.rows import DatasetStats, RowChunk, TokenizedRows
from megatrain.data.source import Source
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError

SETTLED_SECONDS = 2.0
"""A file changed later than this before it was read may change again within its time stamp."""
LIBRARIES = ("transformers", "tokenizers", "jinja2")


def default_cache_dir() -> Path:
    """Beside Hugging Face's: `$XDG_CACHE_HOME`/megatrain/tokens or ~/.cache/megatrain/tokens."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatrain" / "tokens"


class TokenCache:
    """Entries in one folder.

    Args:
        folder: is made when something is to be written.
        note: told once if it cannot be written.
    """

    def __init__(self, folder: str | Path, note: Callable[[str], None] = lambda _: None) -> None:
        self.folder = Path(folder).expanduser()
        self._note, self._noted = note, False

    def entry(self, source: Source, tokenizer: Tokenizer, options: DataOptions) -> "Entry":
        """Where the rows of a source are, or will be.

        Raises:
            UserError: for files that cannot be read.
        """
        state = [_state(file) for file in source.files]
        parts = {
            "content": self._content(source, state),
            "kinds": [[kind_of(file), file.suffix] for file in source.files],
            "variant": source.variant,
            "tokenizer": _tokenizer_digest(tokenizer),
            # What a model lacks refuses rows, and makes no others.
            "options": asdict(replace(options, vocab_size=None, max_positions=None)),
            "code": _code_digest(),
            "libraries": {name: metadata.version(name) for name in LIBRARIES},
        }
        name = _digest(json.dumps(parts, sort_keys=True).encode())
        return Entry(self, self.folder / name, parts, source, state)

    def complain(self, error: OSError) -> None:
        """Say, once, that the folder cannot be written."""
        if not self._noted:
            reason = error.strerror or str(error)
            self._note(
                f"the token cache {self.folder} cannot be written ({reason}): rows are kept in"
                " memory, and are tokenised again next time (dataset_cache_dir names another)"
            )
        self._noted = True

    def _content(self, source: Source, state: list[Any]) -> list[str]:
        """Digest of each file; read again only if one of them may have changed."""
        paths = [str(file.resolve()) for file in source.files]
        known = self.folder / "known" / _digest(json.dumps([paths, state]).encode())
        try:
            found = json.loads(known.read_text(encoding="utf-8"))
            if isinstance(found, list) and len(found) == len(paths):
                return list(map(str, found))
        except (OSError, ValueError):
            pass
        began = time.time()
        digests = [_file_digest(file) for file in source.files]
        latest = max((each["changed_ns"] for each in state), default=0) / 1e9
        if latest < began - SETTLED_SECONDS:
            try:
                known.parent.mkdir(parents=True, exist_ok=True)
                _write_whole(known, json.dumps(digests))
            except OSError:  # told when an entry is to be written, if one is
                pass
        return digests


class Entry:
    """The rows of one source, one tokenizer, one set of options."""

    def __init__(
        self, cache: TokenCache, folder: Path, parts: Any, source: Source, state: list[Any]
    ) -> None:
        self._cache, self.folder, self._parts = cache, folder, parts
        self._source, self._state = source, state

    def open(self) -> TokenizedRows | None:
        """The rows, if they are there and whole; what is damaged is put away."""
        try:
            return self._opened()
        except FileNotFoundError:
            if not self.folder.exists():
                return None
        except (OSError, ValueError, KeyError, TypeError):
            pass
        try:
            put_away(self.folder)
        except OSError as error:
            self._cache.complain(error)
        return None

    def _opened(self) -> TokenizedRows:
        manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        body = manifest["body"]
        if manifest["digest"] != _digest(json.dumps(body).encode()):
            raise ValueError("another manifest than was written")
        stats = DatasetStats(**body["stats"])
        untouched = True
        for name in FILES:
            at = (self.folder / name).stat()
            size, mtime_ns = body["files"][name]
            if at.st_size != size:
                raise ValueError(f"{name} has {at.st_size} bytes of {size}")
            untouched &= at.st_mtime_ns == mtime_ns
        if not untouched and digest_of_files(self.folder) != body["digest"]:
            raise ValueError("other rows than were written")
        touch(self.folder)
        return mapped_rows(self.folder, stats, digest=body["digest"])

    def build(self, chunks: Iterable[RowChunk]) -> TokenizedRows:
        """Write the rows and map them; in memory if the disk does not take them.

        Raises:
            UserError: if a file changed while it was read, and whatever tokenising raises.
        """
        memory = Gathered()
        files = self._files()
        scratch = None if files is None else files.folder
        try:
            for chunk in chunks:
                if files is not None:
                    try:
                        files.take(chunk)
                        continue
                    except OSError as error:
                        self._cache.complain(error)
                        memory.take(files.recover())
                        files.close()
                        files = None
                memory.take(chunk)
            self._check_unchanged()
            if files is not None:
                try:
                    return self._publish(files)
                except OSError as error:
                    self._cache.complain(error)
                    memory.take(files.recover())
            return memory.rows()
        finally:
            if files is not None:
                files.close()
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, files: GatheredFiles) -> TokenizedRows:
        """Give the finished folder its name, unless another run did so first."""
        scratch = files.folder
        files.finish()
        if not files.stats.rows:
            return Gathered().take(files.recover()).rows()
        rows = mapped_rows(scratch, files.stats, digest=digest_of_files(scratch))
        written = {name: (scratch / name).stat() for name in FILES}
        body = {
            "stats": asdict(files.stats),
            "digest": rows.digest,
            "files": {name: [at.st_size, at.st_mtime_ns] for name, at in written.items()},
            "of": self._parts,
        }
        manifest = {"digest": _digest(json.dumps(body).encode()), "body": body}
        _write_whole(scratch / MANIFEST, json.dumps(manifest))
        try:
            scratch.rename(self.folder)
        except OSError:
            if not (self.folder / MANIFEST).is_file():  # else another run was first: the same rows
                raise
        try:
            _sync_folder(self.folder.parent)
        except OSError:  # an entry that a power cut loses is made again
            pass
        return rows  # mapped: they stay, whatever becomes of the names

    def _check_unchanged(self) -> None:
        changed = [
            file
            for file, before in zip(self._source.files, self._state, strict=True)
            if _state(file) != before
        ]
        if changed:
            raise UserError(
                asked=f"data from {changed[0]}",
                found="a file that changed while it was read",
                change="start again when nothing writes to it",
            )

    def _files(self) -> GatheredFiles | None:
        """In a folder of their own, or none if there can be none."""
        scratch = unfinished(self.folder)
        try:
            scratch.parent.mkdir(parents=True, exist_ok=True)
            clean(scratch.parent)
            scratch.mkdir()
            return GatheredFiles(scratch)
        except OSError as error:
            self._cache.complain(error)
            return None


def _write_whole(path: Path, text: str) -> None:
    """Under its name only once it is on the disk."""
    scratch = path.with_name(f"{path.name}-{uuid4().hex}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _state(file: Path) -> dict[str, int]:
    """What changes when a file's content does."""
    try:
        at = file.stat()
    except OSError as error:
        raise unreadable(file, error) from error
    return {
        "size": at.st_size,
        "inode": at.st_ino,
        "changed_ns": max(at.st_mtime_ns, at.st_ctime_ns),
        "mtime_ns": at.st_mtime_ns,
    }


def _file_digest(file: Path) -> str:
    found = xxhash.xxh3_128()
    try:
        with file.open("rb") as stream:
            while content := stream.read(READ_BYTES):
                found.update(content)
    except OSError as error:
        raise unreadable(file, error) from error
    return str(found.hexdigest())


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Of the files that it saves: vocabulary, merges, special tokens, template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        saved = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        parts = [(str(path.relative_to(folder)), _file_digest(path)) for path in saved]
    return _digest(json.dumps([type(tokenizer).__name__, parts]).encode())


def _code_digest() -> str:
    """Of this room's code: rows that an older one made are not taken for this one's."""
    code = sorted(Path(__file__).parent.glob("*.py"))
    return _digest(json.dumps([_file_digest(path) for path in code]).encode())


def _digest(content: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(content))
