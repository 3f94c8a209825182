"""The checkpoints in an output directory: names, one owner, nothing half-written or half-removed.

What is being written is `.checkpoint-N.writing`, what is being removed `.checkpoint-N.removing`;
both are remains of a run that was killed when another one takes the directory over.
"""

import errno
import fcntl
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from megatrain.checkpoint.disk import Disk
from megatrain.checkpoint.manifest import MANIFEST, STATE, looks_whole, model_only, verify
from megatrain.errors import UserError

NAME = re.compile(r"checkpoint-(\d+)")
REMAINS = re.compile(r"\.(checkpoint-\d+|model)\.(writing|removing)")
LOCK = ".lock"


def checkpoints(output: Path) -> dict[int, Path]:
    """Finished checkpoints by step, ascending."""
    if not output.is_dir():
        return {}
    found = {
        int(match[1]): path
        for path in output.iterdir()
        if (match := NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    }
    return dict(sorted(found.items()))


class Lock:
    """Makes this process the only one that writes in a directory; a killed one loses it.

    Held until `release`, or until nobody holds this object.

    Raises:
        UserError: if another process has it.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._take()

    def renew(self) -> None:
        """Take it again if the directory was removed meanwhile: its lock is no other run's.

        Raises:
            UserError: if another process has it by now.
        """
        path = self._output / LOCK
        held = self.release.alive and path.exists()
        if not held or not os.path.samestat(path.stat(), os.fstat(self._descriptor)):
            self.release()
            self._take()

    def _take(self) -> None:
        output = self._output
        descriptor = os.open(output / LOCK, os.O_CREAT | os.O_WRONLY, 0o666)
        self._descriptor = descriptor
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UserError(
                asked=f"output_dir: {output}",
                found="another run that is writing there",
                change="wait for it, stop it, or choose another directory",
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise  # else a file system without locks: nobody can be kept out


def remove_remains(output: Path, disk: Disk) -> None:
    """Remove what a killed run was writing or removing; the directory must be locked.

    A checkpoint that was being replaced gets its name back if the new one has not got it.
    """
    for path in sorted(output.glob(".checkpoint-*.replaced")):
        final = output / path.name.removeprefix(".").removesuffix(".replaced")
        if final.exists():
            disk.remove(path)
        else:
            disk.rename(path, final)
    for path in sorted(output.iterdir()):
        if REMAINS.fullmatch(path.name):
            disk.remove(path)


def last_whole(output: Path, note: Callable[[str], None]) -> Path | None:
    """The latest checkpoint that can be resumed from and is undamaged.

    Args:
        output: of the run.
        note: told of each that is passed over, and why.

    Raises:
        UserError: if there are checkpoints and none can be used.
    """
    passed: list[str] = []
    for path in reversed(checkpoints(output).values()):
        try:
            if STATE in verify(path):
                return path
            passed.append(f"{path.name} is passed over: {model_only(path).found}")
        except UserError as error:
            passed.append(f"{path.name} is passed over: {error.found}")
        note(passed[-1])
    if passed:
        raise UserError(
            asked=f"resume_from_checkpoint in {output}",
            found=f"none to go on from ({'; '.join(passed)})",
            change="bring back a whole one, start a new run in another output_dir from the model of"
            " one of them (model_name_or_path), or set overwrite_output_dir: true without resuming",
        )
    return None


def instead_of(folder: Path) -> Path | None:
    """A checkpoint to go on from where another one is damaged: it looks whole, and is not read.

    The last one before it, or else the first one after it, of those beside it.
    """
    match = NAME.fullmatch(folder.name)
    beside = checkpoints(folder.parent)
    step = int(match[1]) if match else max(beside, default=0) + 1
    before, after = ([n for n in beside if n < step], [n for n in beside if n > step])
    nearest = (beside[number] for number in [*reversed(before), *after])
    return next(filter(looks_whole, nearest), None)


def retire_later(output: Path, step: int, disk: Disk) -> list[Path]:
    """Take the name from checkpoints after a step to which a run goes back; they are kept.

    Else they would pass for the run's latest, and rotation would remove its own before them.
    """
    retired = []
    for number, path in checkpoints(output).items():
        if number > step:
            names = (output / f"abandoned-{path.name}-{again}" for again in count(1))
            target = next(name for name in names if not name.exists())
            disk.rename(path, target)
            retired.append(target)
    disk.sync_directory(output)
    return retired


def name_while_writing(step: int) -> str:
    """Of the directory in which a checkpoint is written."""
    return f".checkpoint-{step}.writing"


def publish(folder: Path, output: Path, step: int, disk: Disk) -> Path:
    """Give a written checkpoint its name; everything in it is on the disk already."""
    final = output / f"checkpoint-{step}"
    disk.sync_directories(folder)
    before = output / f".checkpoint-{step}.replaced"  # found again if this process ends now
    if final.exists():
        disk.remove(before)
        disk.rename(final, before)
    disk.rename(folder, final)
    disk.sync_directory(output)
    with suppress(OSError):  # the next run removes it
        disk.remove(before)
    return final


def remove(path: Path, disk: Disk) -> None:
    """Remove a checkpoint; at no time is there a part of it under its name."""
    doomed = path.with_name(f".{path.name}.removing")
    disk.remove(doomed)
    disk.rename(path, doomed)
    disk.sync_directory(path.parent)
    disk.remove(doomed)


def rotate(output: Path, disk: Disk, *, limit: int | None, keep: Path | None) -> list[Path]:
    """Remove the oldest checkpoints beyond `limit`, never `keep` (the best one) nor the last.

    Returns:
        What was removed.
    """
    found = list(checkpoints(output).values())
    if limit is None or len(found) <= limit:
        return []
    removable = [path for path in found[:-1] if keep is None or path.name != keep.name]
    removed = removable[: len(found) - limit]
    for path in removed:
        remove(path, disk)
    return removed
