"""Progress of a sweep on stderr: a live display on a terminal, one line per event elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Outcome
from autotune.report.units import NOTHING, duration, gib, memory, throughput, tokens
from autotune.search.history import speed
from autotune.search.observer import Observer, Overview
from autotune.search.outcomes import fits
from autotune.store.records import ProbeRecord

LATEST = 8
"""Results that the live display keeps in sight."""

_COLOURS = {Outcome.OK: "green", Outcome.STOPPED: "cyan", Outcome.OOM_DEVICE: "yellow", Outcome.OOM_HOST: "yellow"}


def progress(err: TextIO, machine: Machine, minutes: float | None, earlier: Iterable[ProbeRecord] = ()) -> Progress:
    """The observer that suits a stream; use it as a context.

    Args:
        err: stderr.
        machine: whose memory, less headroom, decides what may be the best so far.
        minutes: the budget of wall clock, None for no limit.
        earlier: probes of earlier runs of the sweep, among which the best so far may be.
    """
    console = Console(file=err, highlight=False, markup=False)
    kind = LiveProgress if console.is_terminal and not console.is_dumb_terminal else LineProgress
    return kind(console, machine, minutes, earlier)


class Progress(Observer):
    """Where a sweep stands: what both displays show."""

    def __init__(
        self, console: Console, machine: Machine, minutes: float | None, earlier: Iterable[ProbeRecord] = ()
    ) -> None:
        self.console = console
        self.machine = machine
        self.overview: Overview | None = None
        self.best: ProbeRecord | None = None
        self.latest: list[ProbeRecord] = []
        self.doing = ""
        self.left: int | None = None
        self._walls: list[float] = []
        self._began = time.monotonic()
        self._since = self._began
        self._ends = None if minutes is None else self._began + minutes * 60
        for record in earlier:
            self._compare(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def telling(self, text: str) -> None:
        """Something takes its time before or between probes: imports, compilation."""
        self.doing = text
        self._since = time.monotonic()

    def started(self, overview: Overview) -> None:
        """See Observer."""
        self.overview = overview

    def preparing(self, done: int, of: int) -> None:
        """See Observer."""
        self.doing = f"tracing: {done:,} of {of:,}"

    def probing(self, candidate: Candidate, number: int, left: int) -> None:
        """See Observer."""
        self._do(f"probe {number}: {self.label(candidate)}", left)

    def confirming(self, candidate: Candidate, number: int, of: int) -> None:
        """See Observer."""
        self._do(f"confirmation {number} of {of}: {self.label(candidate)}", max(of - number, 0))

    def finished(self, record: ProbeRecord) -> None:
        """See Observer."""
        self.doing = ""
        self.latest = [*self.latest, record][-LATEST:]
        if not record.inferred and not record.reused:
            self._walls.append(record.measurement.wall_s)
        self._compare(record)

    def elsewhere(self, record: ProbeRecord) -> None:
        """See Observer."""
        self.latest = [*self.latest, record][-LATEST:]
        self._compare(record)

    def label(self, candidate: Candidate) -> str:
        """A candidate by the knobs that this sweep turns."""
        return candidate.label(self.overview.knobs if self.overview else ())

    def time_left(self) -> float | None:
        """Seconds that the probes left may take, by the median of those done; None before the first."""
        now = time.monotonic()
        limits = [] if self._ends is None else [self._ends - now]
        if self._walls and self.left is not None:
            running = median(self._walls) - (now - self._since) if self.doing else 0.0
            limits.append(max(running, 0.0) + self.left * median(self._walls))
        return max(min(limits), 0.0) if limits else None

    def running_for(self) -> float:
        """Seconds since what is being done began."""
        return time.monotonic() - self._since

    def _do(self, doing: str, left: int) -> None:
        self.doing, self.left, self._since = doing, left, time.monotonic()

    def _compare(self, record: ProbeRecord) -> None:
        if record.confirmation or not fits(record.measurement, self.machine):
            return
        if self.best is None or speed(record) > speed(self.best):
            self.best = record


class LineProgress(Progress):
    """One line per event, with the time of day: for logs, pipes and batch jobs."""

    def telling(self, text: str) -> None:
        """See Progress."""
        super().telling(text)
        self._say(text)

    def started(self, overview: Overview) -> None:
        """See Observer."""
        super().started(overview)
        for line in overview.ledger.splitlines():
            self._say(line)
        for reason, count in overview.impossible.items():
            self._say(f"{count:,} candidates cannot run: {reason}")
        self._say(headline(overview))

    def preparing(self, done: int, of: int) -> None:
        """See Progress. A line for every tenth."""
        super().preparing(done, of)
        if done * 10 // of > (done - 1) * 10 // of:
            self._say(self.doing)

    def probing(self, candidate: Candidate, number: int, left: int) -> None:
        """See Observer."""
        super().probing(candidate, number, left)
        if self.overview is not None and self.overview.predicted:
            return  # what comes of it follows at once
        self._say(f"{self.doing} (at most {left} more{self._about()})")

    def confirming(self, candidate: Candidate, number: int, of: int) -> None:
        """See Observer."""
        super().confirming(candidate, number, of)
        self._say(self.doing)

    def finished(self, record: ProbeRecord) -> None:
        """See Observer."""
        super().finished(record)
        best = ", the best so far" if self.best is record else ""
        self._say(f"trial {record.trial}: {result(record)}{best}: {self.label(record.candidate)}")

    def elsewhere(self, record: ProbeRecord) -> None:
        """See Observer."""
        super().elsewhere(record)
        best = ", the best so far" if self.best is record else ""
        self._say(f"trial {record.trial} by {record.worker}: {result(record)}{best}: {self.label(record.candidate)}")

    def waiting(self, sentence: str) -> None:
        """See Observer."""
        self._say(sentence)

    def again(self, record: ProbeRecord, attempt: int) -> None:
        """See Observer."""
        self._say(f"{again(record, attempt)}: {self.label(record.candidate)}")

    def searched(self, reason: str) -> None:
        """See Observer."""
        self._say(f"search ended: {reason}")

    def noticed(self, text: str) -> None:
        """See Observer."""
        self._say(text)

    def _about(self) -> str:
        left = self.time_left()
        return "" if left is None else f", about {duration(left)}"

    def _say(self, line: str) -> None:
        print(time.strftime("%H:%M:%S"), line, file=self.console.file, flush=True)


class LiveProgress(Progress):
    """What is being probed, how many are left, the best so far, the time left, and the latest results."""

    def __init__(
        self, console: Console, machine: Machine, minutes: float | None, earlier: Iterable[ProbeRecord] = ()
    ) -> None:
        super().__init__(console, machine, minutes, earlier)
        self._note = ""
        self._live = Live(self, console=console, refresh_per_second=4, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.doing = ""
        self._live.stop()

    def started(self, overview: Overview) -> None:
        """See Observer."""
        super().started(overview)
        self.console.print(overview.ledger)
        for reason, count in overview.impossible.items():
            self.console.print(f"{count:,} candidates cannot run: {reason}")

    def waiting(self, sentence: str) -> None:
        """See Observer."""
        self._note = sentence

    def again(self, record: ProbeRecord, attempt: int) -> None:
        """See Observer."""
        self._note = again(record, attempt)

    def searched(self, reason: str) -> None:
        """See Observer."""
        self._note = f"search ended: {reason}"

    def noticed(self, text: str) -> None:
        """See Observer. It stays above the display."""
        self.console.print(text)

    def __rich__(self) -> RenderableType:
        """The display as it is now; rich asks four times a second."""
        facts = Table.grid(padding=(0, 2))
        if self.overview is not None:
            facts.add_row("study", headline(self.overview))
        if self.doing:
            facts.add_row("now", f"{self.doing}  {duration(self.running_for())}")
        if self.best is not None:
            facts.add_row(
                "best",
                Text(f"{throughput(self.best.measurement)}  {self.label(self.best.candidate)}", style="bold green"),
            )
        left = self.time_left()
        if self.left is not None:
            about = "" if left is None else f", about {duration(left)}"
            facts.add_row("left", f"at most {self.left} more{about}")
        if self._note:
            facts.add_row("note", self._note)
        return Group(facts, self._results()) if self.latest else facts

    def _results(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("trial", "candidate", "outcome", "tokens/s", "memory", "took"):
            table.add_column(name, justify="left" if name in ("candidate", "outcome") else "right")
        for record in self.latest:
            measurement = record.measurement
            started = measurement.wall_s and not record.inferred and not record.reused
            table.add_row(
                str(record.trial),
                self.label(record.candidate),
                Text(how(record), style=_COLOURS.get(measurement.outcome, "red")),
                tokens(measurement.tokens_per_s),
                memory(measurement),
                f"{measurement.wall_s:.1f} s" if started else NOTHING,
            )
        return table


def headline(overview: Overview) -> str:
    """A sweep in one line."""
    tried = f", {overview.tried:,} of them tried already" if overview.tried else ""
    spent = f", {overview.spent:,} of them spent" if overview.spent else ""
    return (
        f"{overview.study}: {overview.candidates:,} candidates{tried}; sampler {overview.sampler}, "
        f"budget {overview.budget:,} {'predictions' if overview.predicted else 'probes'}{spent}"
    )


def how(record: ProbeRecord) -> str:
    """How a probe ended, in a few words: outcome, phase, and where it comes from if not from a process."""
    measurement = record.measurement
    phase = f" in {measurement.phase.value}" if measurement.phase and measurement.outcome is not Outcome.OK else ""
    origin = [word for word in ("inferred", "reused") if getattr(record, word)]
    origin += ["confirmation"] if record.confirmation else []
    origin += ["at risk"] if measurement.at_risk else []
    return measurement.outcome.value + phase + (f" ({', '.join(origin)})" if origin else "")


def result(record: ProbeRecord) -> str:
    """What a probe found, in a line."""
    measurement = record.measurement
    parts = [how(record)]
    if measurement.outcome.measured_memory:
        parts += [throughput(measurement), gib(measurement.used_bytes)]
    elif measurement.message and not record.inferred:
        parts.append(_one_line(measurement.message))
    if measurement.wall_s and not record.inferred and not record.reused:
        parts.append(f"{measurement.wall_s:.1f} s")
    return ", ".join(parts)


def again(record: ProbeRecord, attempt: int) -> str:
    """That a probe is tried again, and why."""
    why = _one_line(record.measurement.message or "no message")
    return f"trial {record.trial} ended as {record.measurement.outcome.value} ({why}), attempt {attempt} follows"


def _one_line(message: str) -> str:
    return " ".join(message.split())
