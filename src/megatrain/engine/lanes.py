"""How the operations of a schedule are run: inline, or on one thread (and CUDA stream) a lane.

Both run the very same list.  Inline is the reference: list order, one thread.  With threads each
lane works through its own operations in order and waits only where the schedule says so.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatrain.schedule import Lane, Op

Handler = Callable[[Op], None]


class Lanes(Protocol):
    """Runs a list of operations to its end."""

    def run(self, ops: Sequence[Op], waits: Sequence[Sequence[int]], handle: Handler) -> None:
        """Run all operations; returns when everything, device work included, is done."""


class InlineLanes:
    """One operation after the other, in list order, on the calling thread.

    On a GPU the host still has to wait for copies that it reads: before its own operations and at
    the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, ops: Sequence[Op], waits: Sequence[Sequence[int]], handle: Handler) -> None:
        for op in ops:
            if op.lane is Lane.HOST:
                self._wait_for_device()
            handle(op)
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Mark:
    """Set when an operation has been issued; on a stream lane it carries the stream's event."""

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.event: torch.cuda.Event | None = None

    def order_after(self, stream: "torch.cuda.Stream | None") -> None:
        """Make the calling lane wait: its stream if it has one, else its thread."""
        self.issued.wait()
        if self.event is None:
            return
        if stream is None:
            self.event.synchronize()
        else:
            stream.wait_event(self.event)


class ThreadLanes:
    """One thread a lane; on CUDA the h2d, compute and d2h lanes have a stream each.

    An event is recorded before any other lane is told to wait for it, because `issued` is set
    after the record; waiting for an unrecorded event would silently not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: dict[Lane, torch.cuda.Stream | None] = dict.fromkeys(Lane)
        if device.type == "cuda":
            for lane in (Lane.H2D, Lane.COMPUTE, Lane.D2H):
                self.streams[lane] = torch.cuda.Stream(device)

    def run(self, ops: Sequence[Op], waits: Sequence[Sequence[int]], handle: Handler) -> None:
        marks = [_Mark() for _ in ops]
        failures: list[BaseException] = []

        def fail(error: BaseException) -> None:
            failures.append(error)
            for mark in marks:
                mark.issued.set()

        def work(lane: Lane) -> None:
            stream = self.streams[lane]
            try:
                for index, op in enumerate(ops):
                    if op.lane is not lane:
                        continue
                    for earlier in waits[index]:
                        marks[earlier].order_after(stream)
                    if failures:
                        return
                    with torch.cuda.stream(stream):  # no effect when there is no stream
                        handle(op)
                        if stream is not None:
                            marks[index].event = stream.record_event()
                    marks[index].issued.set()
            except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
                fail(error)
            finally:
                ended[lane].set()

        used = {op.lane for op in ops}
        ended = {lane: threading.Event() for lane in used}
        threads = [
            threading.Thread(target=work, args=(lane,), name=f"megatrain-{lane}", daemon=True)
            for lane in used
        ]
        try:
            for thread in threads:
                thread.start()
            for event in ended.values():  # a join that is interrupted takes the thread for dead
                event.wait()
        except BaseException as interrupt:  # noqa: BLE001  the lanes must stop before it goes on
            fail(interrupt)
            for lane, thread in zip(used, threads, strict=True):
                if thread.ident is not None:  # it was started
                    ended[lane].wait()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # the error's traceback holds this frame: keep no cycle of buffers
            for used_stream in self.streams.values():
                if used_stream is not None:
                    used_stream.synchronize()
