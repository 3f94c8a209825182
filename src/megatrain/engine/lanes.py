"""How the operations of a schedule are run: inline, or on one thread (and CUDA stream) a lane.

Both run the very same list.  Inline is the reference: list order, one thread.  With threads each
lane works through its own operations in order and waits only where the schedule says so.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from megatrain.schedule import STREAM_LANES, Lane, Op, Span

Handler = Callable[[Op], None]


class Lanes(Protocol):
    """Runs a list of operations to its end."""

    def run(
        self,
        ops: Sequence[Op],
        waits: Sequence[Sequence[int]],
        handle: Handler,
        spans: list[Span] | None = None,
    ) -> None:
        """Run all operations; returns when everything, device work included, is done.

        When each ran is appended to `spans` if it is given.
        """


class InlineLanes:
    """One operation after the other, in list order, on the calling thread.

    On a GPU the host still has to wait for copies that it reads: before its own operations and at
    the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(
        self,
        ops: Sequence[Op],
        waits: Sequence[Sequence[int]],
        handle: Handler,
        spans: list[Span] | None = None,
    ) -> None:
        for op in ops:
            if op.lane not in STREAM_LANES:
                self._wait_for_device()
            start = time.perf_counter()
            handle(op)
            if spans is not None:
                self._wait_for_device()
                spans.append(Span(op=op, start_s=start, end_s=time.perf_counter()))
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


class _Clock:
    """Reads host time on host lanes and the device's time on stream lanes, on one scale."""

    def __init__(self, streams: "dict[Lane, torch.cuda.Stream | None]") -> None:
        self._readings: list[tuple[Op, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._zero: torch.cuda.Event | None = None
        stream = next((stream for stream in streams.values() if stream is not None), None)
        if stream is not None:
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record(stream)
            self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def read(self, stream: "torch.cuda.Stream | None") -> "float | torch.cuda.Event":
        if stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def add(
        self, op: Op, start: "float | torch.cuda.Event", end: "float | torch.cuda.Event"
    ) -> None:
        self._readings.append((op, start, end))

    def spans(self) -> list[Span]:
        """In order of their starts; everything must be done."""
        spans = [
            Span(op=op, start_s=self._seconds(start), end_s=self._seconds(end))
            for op, start, end in self._readings
        ]
        return sorted(spans, key=lambda span: span.start_s)

    def _seconds(self, reading: "float | torch.cuda.Event") -> float:
        if isinstance(reading, float):
            return reading
        assert self._zero is not None
        return self._zero_s + self._zero.elapsed_time(reading) / 1e3


def _issue(
    op: Op, stream: "torch.cuda.Stream | None", handle: Handler, clock: _Clock | None
) -> "torch.cuda.Event | None":
    """Run an operation, or put it into its stream; the event then marks its end."""
    with torch.cuda.stream(stream):  # no effect when there is no stream
        start = None if clock is None else clock.read(stream)
        handle(op)
        if clock is not None and start is not None:
            clock.add(op, start, clock.read(stream))
        return None if stream is None else stream.record_event()


class _LaneThread:
    """A thread that does one piece of work after the other until it is told to stop.

    It lives as long as its lanes: cuDNN keeps the attention kernels that it has chosen for each
    thread, so a new thread would choose them again (70 ms on an H200, in every step).
    """

    def __init__(self, lane: Lane) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_work_until_stopped, args=(self._work,), name=f"megatrain-{lane}", daemon=True
        )
        self.thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def stop(self) -> None:
        self._work.put(None)


def _work_until_stopped(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (piece := work.get()) is not None:
        piece()
        del piece  # it holds a step's buffers


class ThreadLanes:
    """One thread a lane; on CUDA the h2d, compute and d2h lanes have a stream each.

    An event is recorded before any other lane is told to wait for it, because `issued` is set
    after the record; waiting for an unrecorded event would silently not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: dict[Lane, torch.cuda.Stream | None] = dict.fromkeys(Lane)
        if device.type == "cuda":
            for lane in STREAM_LANES:
                self.streams[lane] = torch.cuda.Stream(device)
        self._threads = {lane: _LaneThread(lane) for lane in Lane}
        for thread in self._threads.values():
            weakref.finalize(self, thread.stop)

    def run(
        self,
        ops: Sequence[Op],
        waits: Sequence[Sequence[int]],
        handle: Handler,
        spans: list[Span] | None = None,
    ) -> None:
        marks = [_Mark() for _ in ops]
        clock = None if spans is None else _Clock(self.streams)
        failures: list[BaseException] = []
        stopped = threading.Event()
        ended = {lane: threading.Event() for lane in Lane}

        def fail(error: BaseException) -> None:
            failures.append(error)
            stopped.set()
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
                    if stopped.is_set():
                        return
                    marks[index].event = _issue(op, stream, handle, clock)
                    marks[index].issued.set()
            except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
                fail(error)
            finally:
                ended[lane].set()

        def run_all() -> None:
            for lane, thread in self._threads.items():
                thread.do(partial(work, lane))
            for event in ended.values():
                event.wait()

        try:
            run_all()
        except BaseException as interrupt:  # noqa: BLE001  the lanes must stop before it goes on
            fail(interrupt)
            run_all()  # again: a lane that had not begun ends at once, the others go first
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # the error's traceback holds this frame: keep no cycle of buffers
            for used_stream in self.streams.values():
                if used_stream is not None:
                    used_stream.synchronize()
        if clock is not None and spans is not None:
            spans += clock.spans()


def choose_lanes(device: torch.device, threads: bool | None, *, disk: bool) -> Lanes:
    """Threads if asked for; if not said, where something can run beside the computation.

    Args:
        device: where blocks are computed.
        threads: as the options say.
        disk: whether blocks live on the disk.
    """
    on_threads = device.type == "cuda" or disk if threads is None else threads
    return ThreadLanes(device) if on_threads else InlineLanes(device)
