"""What signals and the trigger file ask for, whatever terminal and disk do."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.trainer.signals import Requests


class Ended(Exception):  # noqa: N818
    """In place of the end of this process."""


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requests:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    return Requests(tmp_path)


def test_a_second_interrupt_ends_at_once_whatever_came_before(requests: Requests) -> None:
    requests._take(signal.SIGTERM, None)
    requests._take(signal.SIGINT, None)
    assert requests.stop is signal.SIGTERM
    with pytest.raises(Ended, match="130"):
        requests._take(signal.SIGINT, None)


def test_a_second_sigterm_asks_for_nothing_more(requests: Requests) -> None:
    requests._take(signal.SIGTERM, None)
    requests._take(signal.SIGTERM, None)
    assert requests.stop is signal.SIGTERM


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("reentrant")])
def test_a_terminal_that_has_gone_is_no_obstacle(
    error: Exception, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise error

        flush = write

    monkeypatch.setattr(sys, "stderr", Gone())
    requests._take(signal.SIGTERM, None)
    assert requests.stop is signal.SIGTERM
    requests._take(signal.SIGINT, None)
    with pytest.raises(Ended):
        requests._take(signal.SIGINT, None)


def test_a_trigger_that_cannot_be_removed_asks_once(
    requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = tmp_path / "SAVE"
    trigger.touch()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert [requests.take_save() for _ in range(3)] == [True, False, False]
    monkeypatch.undo()
    assert not requests.take_save() and not trigger.exists()
    trigger.touch()
    assert requests.take_save() and not trigger.exists()


def test_an_output_directory_that_cannot_be_looked_at_asks_for_nothing(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*arguments: Any) -> bool:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "is_file", stale)
    assert not requests.take_save()
    requests._take(signal.SIGUSR1, None)
    assert requests.take_save() and not requests.take_save()
