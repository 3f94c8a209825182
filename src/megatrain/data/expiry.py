"""What of a token cache may go: remains of killed runs, entries that nothing has opened for long.

Promise: nothing but what the cache itself made is removed.  A run that has an entry mapped keeps
its rows; one that is about to open it makes it again.
"""

import contextlib
import re
import shutil
import time
from pathlib import Path
from uuid import uuid4

MANIFEST = "manifest.json"
"""Of an entry; its time is that of the last opening."""
UNFINISHED = ".unfinished"
STALE_SECONDS = 24 * 3600
"""Remains of a killed run that nothing was written to for so long are removed."""
UNUSED_SECONDS = 30 * 24 * 3600
"""An entry that was not opened for so long is removed."""
ENTRY = re.compile(r"[0-9a-f]{32}")


def touch(entry: Path) -> None:
    """Say that an entry is in use; in a folder of others nothing is said, nor removed."""
    with contextlib.suppress(OSError):
        (entry / MANIFEST).touch()


def unfinished(entry: Path) -> Path:
    """A name of its own for what is not, or no longer, an entry."""
    return entry.parent / f"{entry.name}-{uuid4().hex}{UNFINISHED}"


def put_away(entry: Path) -> None:
    """Remove an entry: out of the way first, so that no other run opens what is being removed.

    Raises:
        OSError: if it cannot be.
    """
    away = unfinished(entry)
    entry.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what is old; what cannot be removed stays."""
    now = time.time()
    for path in folder.glob(f"*{UNFINISHED}"):
        try:
            last = max(each.stat().st_mtime for each in (path, *path.iterdir()))
        except OSError:  # its run has just finished
            continue
        if last < now - STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
    for manifest in folder.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError):  # another run was first
            old = manifest.stat().st_mtime < now - UNUSED_SECONDS
            if old and ENTRY.fullmatch(manifest.parent.name):
                put_away(manifest.parent)
