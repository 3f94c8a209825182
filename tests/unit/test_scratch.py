"""Scratch files: direct I/O in pieces, and what becomes of it where there is none."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import UserError
from megatrain.memory import HostSlab, scratch
from megatrain.memory.scratch import PIECE_BYTES, ScratchFile

PAGE = 4096
SIZE = 3 * PIECE_BYTES + PAGE


def memory(fill: bool) -> torch.Tensor:
    taken = HostSlab(SIZE, pin=False).take(SIZE)
    return taken.random_() if fill else taken


def test_what_is_written_is_read_and_the_file_has_no_name(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 2 * SIZE)
    assert not list(tmp_path.iterdir())
    source, target = memory(fill=True), memory(fill=False)
    file.write([(PAGE, source[:PAGE]), (4 * PAGE, source[PAGE:])])
    file.read([(4 * PAGE, target[PAGE:]), (PAGE, target[:PAGE])])
    assert torch.equal(source, target)
    assert (file.bytes_read, file.bytes_written) == (SIZE, SIZE)
    file.read([(SIZE + 4 * PAGE, target[:PAGE])])
    assert not target[:PAGE].any()  # what was never written is zero
    file.close()


def test_its_room_is_reserved_when_it_is_made(tmp_path: Path) -> None:
    """So a disk cannot fill up under a run: nobody else can take the room any more."""
    file = ScratchFile(tmp_path, SIZE)
    assert os.fstat(file._file).st_blocks * 512 >= SIZE
    file.close()


def test_requests_that_are_half_done_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(call: Callable[..., int]) -> Callable[..., int]:
        def half(file: int, buffers: list[memoryview], offset: int) -> int:
            part = buffers[0][: max(PAGE, len(buffers[0]) // 2 // PAGE * PAGE)]
            return call(file, [part], offset)

        return half

    file = ScratchFile(tmp_path, SIZE)
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, halved(getattr(os, name)))
    source, target = memory(fill=True), memory(fill=False)
    file.write([(0, source)])
    file.read([(0, target)])
    assert torch.equal(source, target)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="ends too early"):
        file.read([(0, target)])
    file.close()


def test_a_file_system_without_direct_io_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuses(file: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    file = ScratchFile(tmp_path, SIZE)
    assert file.notice is not None and "no direct I/O" in file.notice
    source, target = memory(fill=True), memory(fill=False)
    file.write([(0, source)])
    file.read([(0, target)])
    assert torch.equal(source, target)
    file.close()


def test_memory_that_passes_for_a_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_file_system", lambda device: "tmpfs")
    file = ScratchFile(tmp_path, PAGE)
    assert file.notice is not None and "is on tmpfs: that is memory, not a disk" in file.notice
    file.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at the usual place")
def test_a_real_tmpfs_is_recognised() -> None:
    file = ScratchFile(Path("/dev/shm"), PAGE)
    assert "memory, not a disk" in str(file.notice)
    file.close()


def test_room_is_given_back_by_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    real = os.close

    def full(*arguments: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def close(file: int) -> None:
        closed.append(file)
        real(file)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(
        UserError, match=r"disk_path: .* with 1\.00 GiB of scratch space: Disk quota"
    ):
        ScratchFile(tmp_path, 2**30)
    assert closed
    assert not list(tmp_path.iterdir())
