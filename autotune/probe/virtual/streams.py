"""The streams and events of a virtual device: they take no time, and stand on the tape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autotune.probe.virtual.recorder import Recorder
from autotune.probe.virtual.tape import Kind


class Streams:
    """The streams of one device: numbers, and which of them is current. The default stream is 0."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.default = Stream(self)
        self.current = self.default
        self.made = 1
        self.events = 0
        self._last_record = (0, 0)
        recorder.stream = lambda: self.current.number
        torch.Tensor.record_stream = lambda tensor, stream: self.record(tensor, stream)  # type: ignore

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream current for a while."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """A tensor is used on another stream: once freed, it stays until that stream is through."""
        ident = self.recorder.ident(tensor)
        if ident is not None and self._last_record != (ident, stream.number):  # of many views, one after the other
            self._last_record = (ident, stream.number)
            self.recorder.mark(Kind.RECORD_STREAM, ident, stream.number)


class Stream:
    """A queue of work of the device, as far as memory is concerned."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.number = getattr(streams, "made", 0)
        streams.made = self.number + 1

    def wait_stream(self, other: Stream) -> None:
        """Work given from here on waits for what the other has got so far."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Work given from here on waits for an event."""
        self.streams.recorder.mark(Kind.EVENT_WAIT, event.number, self.number)

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event behind what was given so far."""
        event = event or Event(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for everything given so far."""
        self.streams.recorder.mark(Kind.SYNCHRONIZE, 0, self.number)

    def query(self) -> bool:
        """Whether everything given so far is done; here the device is always quick."""
        return True


class Event:
    """A mark in a stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        streams.events += 1
        self.number = streams.events
        self.behind = 0

    def record(self, stream: Stream | None = None) -> None:
        """Put it behind what a stream, the current one by default, was given so far."""
        self.behind = (stream or self.streams.current).number
        self.streams.recorder.mark(Kind.EVENT_RECORD, self.number, self.behind)

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits for it."""
        (stream or self.streams.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for it."""
        self.streams.recorder.mark(Kind.SYNCHRONIZE, 0, self.behind)

    def query(self) -> bool:
        """Whether it has happened; here the device is always quick."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds between two events: nothing here takes time."""
        return 1.0
