"""Prediction beside measurement: errors by phase and meter, one table, one JSON document, and whether it is good."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from autotune.candidate import Candidate
from autotune.machine.machine import GIB
from autotune.probe.measurement import Measurement, Outcome
from autotune.report.output import print_table

PHASES = ("init", "first_step", "forward", "backward", "step")
"""Not loading, where a probe gives the weights their values."""
METERS = ("allocated", "reserved", "device_total")
LIMIT = 0.01
"""Allocated may be predicted so far off in any phase; the other meters depend on the driver and are shown."""


@dataclass(frozen=True)
class Figure:
    """One meter in one phase, bytes."""

    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """By which share of the measurement the prediction is off."""
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


@dataclass(frozen=True)
class Pair:
    """One candidate, predicted and measured with so many ranks."""

    world: int
    candidate: Candidate
    predicted: Measurement
    measured: Measurement

    @property
    def agree(self) -> bool:
        """Whether both end alike."""
        return self.predicted.outcome is self.measured.outcome

    def figures(self) -> dict[str, dict[str, Figure]]:
        """Meter → phase → what is known from both, of the rank that was predicted."""
        rank = self.predicted.worst_rank or 0
        found: dict[str, dict[str, Figure]] = {}
        for phase in PHASES:
            mine = next(iter(self.predicted.memory.get(phase, [])), {})
            theirs = next((m for m in self.measured.memory.get(phase, []) if m["rank"] == rank), {})
            for meter in METERS:
                if meter in mine and meter in theirs:
                    found.setdefault(meter, {})[phase] = Figure(mine[meter], theirs[meter])
        return found

    def faults(self) -> list[str]:
        """What is not as predicted, a sentence each."""
        if not self.agree:
            ends = f"{self.predicted.outcome} is predicted, and {self.measured.outcome} came"
            return [f"{ends}: {self.predicted.message or self.measured.message}"]
        if self.measured.outcome is not Outcome.OK:
            return [] if self.measured.outcome.is_oom else [f"{self.measured.outcome}: {self.measured.message}"]
        allocated = self.figures().get("allocated", {})
        if missing := [phase for phase in PHASES if phase not in allocated]:
            return [f"nothing is known of {', '.join(missing)}"]
        return [
            f"allocated in {phase} is predicted {figure.error:+.2%} off ({figure.predicted:,} for {figure.measured:,})"
            for phase, figure in allocated.items()
            if abs(figure.error) > LIMIT
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "world": self.world,
            "candidate": self.candidate.to_dict(),
            "outcome": {"predicted": self.predicted.outcome, "measured": self.measured.outcome},
            "message": {"predicted": self.predicted.message, "measured": self.measured.message},
            "figures": {
                meter: {phase: asdict(figure) | {"error": figure.error} for phase, figure in phases.items()}
                for meter, phases in self.figures().items()
            },
            "rank": self.predicted.worst_rank,
            "memory": {"predicted": self.predicted.memory, "measured": self.measured.memory},
            "wall_s": self.measured.wall_s,
            "overhead_s": self.measured.overhead_s,
            "step_s": {"predicted": self.predicted.step_s, "measured": self.measured.step_s},
            "detail": self.measured.detail,
            "faults": self.faults(),
        }


@dataclass(frozen=True)
class Check:
    """Something beside memory that was looked at."""

    passed: bool
    sentence: str


@dataclass
class Report:
    """All that was found; grows as it is found."""

    about: dict[str, Any] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether everything was as it should be, and something was looked at."""
        compared = any(pair.measured.outcome is Outcome.OK for pair in self.pairs)
        return compared and not any(p.faults() for p in self.pairs) and all(check.passed for check in self.checks)

    def print(self, out: TextIO) -> None:
        """Print the table, then what else was found."""
        columns = ["ranks", "candidate", "meter", *(phase.replace("_", " ") for phase in PHASES)]
        title = "measured, GiB, and by how much the prediction is off"
        print_table(out, columns, [row for pair in self.pairs for row in _rows(pair)], title=title)
        for pair in self.pairs:
            for fault in pair.faults():
                out.write(f"WRONG  {pair.world} ranks  {pair.candidate}: {fault}\n")
        for check in self.checks:
            out.write(f"{'ok   ' if check.passed else 'WRONG'}  {check.sentence}\n")
        for name in self.left_out:
            out.write(f"left out, no time: {name}\n")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "good": self.good,
            **self.about,
            "pairs": [pair.to_dict() for pair in self.pairs],
            "checks": [asdict(check) for check in self.checks],
            "left_out": self.left_out,
        }


def _rows(pair: Pair) -> list[list[str]]:
    head = [str(pair.world), str(pair.candidate)]
    figures = pair.figures()
    if pair.measured.outcome is not Outcome.OK or not figures:
        ends = pair.measured.outcome if pair.agree else f"{pair.measured.outcome}, not {pair.predicted.outcome}"
        return [[*head, str(ends), *([""] * len(PHASES))]]
    return [
        [*(head if first else ["", ""]), meter.replace("_", " "), *(_cell(phases.get(phase)) for phase in PHASES)]
        for first, (meter, phases) in zip([True, *[False] * len(METERS)], figures.items(), strict=False)
    ]


def _cell(figure: Figure | None) -> str:
    return "–" if figure is None else f"{figure.measured / GIB:.3f} {figure.error:+.2%}"
