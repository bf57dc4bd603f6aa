"""What a search tells while it runs. The methods here do nothing: override those that matter."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.candidate import Candidate
from autotune.store.records import ProbeRecord


@dataclass(frozen=True, slots=True)
class Overview:
    """A sweep before its first probe.

    Attributes:
        study: its name.
        sampler: `list`, `random`, `tpe` or `gp`.
        candidates: that may be tried.
        tried: of them, already; a sweep that goes on has some.
        impossible: that cannot run at all, by reason.
        budget: processes that may be started.
        spent: of them, by earlier runs of this sweep.
        knobs: those of which the space lists more than one value.
        ledger: several lines on how the candidates came about.
        predicted: candidates are not measured.
    """

    study: str
    sampler: str
    candidates: int
    tried: int
    impossible: dict[str, int]
    budget: int
    spent: int
    knobs: tuple[str, ...]
    ledger: str
    predicted: bool = False


class Observer:
    """Follows a search: subclass and override. Called from the search's own thread, between its steps."""

    def started(self, overview: Overview) -> None:
        """The sweep begins, or goes on."""

    def preparing(self, done: int, of: int) -> None:
        """The prober works ahead: so much is done of what there is to do."""

    def probing(self, candidate: Candidate, number: int, left: int) -> None:
        """A process is about to be started: the `number`-th for search, with at most `left` more after it."""

    def finished(self, record: ProbeRecord) -> None:
        """A measurement is stored: of a probe, inferred, reused, or a confirmation."""

    def elsewhere(self, record: ProbeRecord) -> None:
        """Another worker's measurement has been stored (`record.worker` says whose)."""

    def waiting(self, sentence: str) -> None:
        """Nothing can be done for the moment, or something has changed that people should know."""

    def again(self, record: ProbeRecord, attempt: int) -> None:
        """A probe that crashed, or that we failed, is tried again; `attempt` counts from 2."""

    def searched(self, reason: str) -> None:
        """The search has ended, for this reason; confirmations follow."""

    def confirming(self, candidate: Candidate, number: int, of: int) -> None:
        """A finalist or the reference is about to be measured again, the `number`-th of about `of`."""

    def noticed(self, text: str) -> None:
        """Something that whoever reads the results should know, one sentence: a device is busy, a rank is slow."""
