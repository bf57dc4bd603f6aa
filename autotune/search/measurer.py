"""Finding out about one candidate with as little as it takes: inferred, taken over, or probed; then stored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import InfraError, SettingsError, StoreError
from autotune.probe.measurement import VIRTUAL, Measurement, Outcome
from autotune.probe.prober import Prober, ProbeRequest
from autotune.search.frontier import inferred
from autotune.search.history import DEADLY, History, speed
from autotune.search.notices import notice
from autotune.search.observer import Observer
from autotune.search.referee import COMPARISON, PARITY
from autotune.settings import Settings
from autotune.store import spool
from autotune.store.claims import Claim
from autotune.store.records import ProbeRecord, probe_row
from autotune.store.reuse import reuse_key
from autotune.store.store import Store
from autotune.workload.phase import Phase

INFRA_ATTEMPTS = 3
NEIGHBOURS = "neighbours"
"""In a measurement's environment: how many other workers of the study were on the machine."""
_EARLY = frozenset({Phase.LOAD, Phase.INIT, Phase.FORWARD})


@dataclass(frozen=True, slots=True)
class Turn:
    """A candidate's turn to be measured.

    Attributes:
        claim: on the candidate.
        left: how many more probes there may be after this one.
        in_flight: how many probes other workers have started.
        neighbours: workers that may disturb it on this machine.
    """

    claim: Claim
    left: int
    in_flight: int = 0
    neighbours: int = 0


class TryAgain(Exception):
    """A probe failed for reasons of ours, and its candidate is to be tried again."""


class Measurer:
    """Measures candidates for one sweep and keeps what comes of it.

    Args:
        settings: probe, budget and launcher, and what they are for.
        store: takes every measurement.
        prober: measures.
        environment: what else must be equal for a measurement to be reused.
        observer: is told what happens.
        optuna_study: what this sweep's probes are marked with.
        worker: who this is, as `host:pid`.

    Attributes:
        kept: the numbers of the probes that this process stored.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        prober: Prober,
        environment: Mapping[str, Any],
        observer: Observer,
        optuna_study: str,
        worker: str,
    ) -> None:
        self._worker = worker
        self.kept: set[int] = set()
        self._settings, self._store, self._prober = settings, store, prober
        self._environment, self._observer = environment, observer
        self._study, self._optuna_study = settings.study_name, optuna_study
        self._predicts = prober.kind == VIRTUAL
        self._infra: Counter[Candidate] = Counter()
        self._told: set[int] = set()
        self._unconfirmed = 0

    def conditions(
        self, candidate: Candidate, *, confirmation: bool = False, neighbours: int = 0, steps: int | None = None
    ) -> str:
        """The reuse key under which this sweep measures a candidate, on a quiet machine or beside other probes.

        `steps` are those of a probe that is only made to be compared.
        """
        settings, probe = self._settings, self._settings.probe
        protocol = {
            "warmup_steps": probe.warmup_steps,
            "steps": steps or (probe.confirm_steps if confirmation else probe.steps),
            "threads": probe.threads,
            "confirmation": confirmation or steps is not None,  # accumulation in full, nothing ends it early
        }
        protocol |= {NEIGHBOURS: neighbours} if neighbours else {}
        return reuse_key(
            candidate,
            settings.workload,
            settings.machine,
            self._prober.kind,
            settings.launcher.name,
            protocol,
            self._environment,
        )

    def same_conditions(self, record: ProbeRecord) -> str:
        """The reuse key under which this sweep would measure a record's candidate, neighbours as they were."""
        return self.conditions(record.candidate, neighbours=record.measurement.environment.get(NEIGHBOURS, 0))

    def settle(self, candidate: Candidate, history: History, number: int | None, turn: Turn) -> ProbeRecord:
        """Find out about a candidate for the search.

        Args:
            candidate: one that is not settled.
            history: what is known, kept up to date.
            number: of the Optuna trial that asks, None where none does.
            turn: under which claim, and how things stand.

        Returns:
            The probe that settles the candidate.

        Raises:
            TryAgain: the probe failed for reasons of ours.
            ClaimLost: the other workers took this one for dead, and the candidate over.
            InfraError: so did the two before it.
            SettingsError: it fails just as the first candidate did: the model itself fails.
        """
        source = history.frontier.source(candidate)
        if source is not None and not self._predicts:
            return self._keep(candidate, inferred(source), history, turn.claim, inferred=True, optuna_number=number)
        key = self.conditions(candidate, neighbours=turn.neighbours)
        reused = self._store.reusable(key)
        if reused is not None:
            return self._keep(candidate, reused, history, turn.claim, reused=True, reuse_key=key, optuna_number=number)
        while True:
            self._observer.probing(candidate, history.spent + turn.in_flight + 1, turn.left)
            enough = speed(history.best) if self._settings.probe.stop_losers and history.best else None
            request = ProbeRequest(candidate, self._settings.probe.steps, stop_below_tokens_per_s=enough)
            measurement = _beside(self._prober.probe(request), turn.neighbours)
            release = measurement.outcome is not Outcome.CRASHED or history.crash_settles(candidate)
            record = self._keep(
                candidate, measurement, history, turn.claim, release=release, reuse_key=key, optuna_number=number
            )
            if measurement.outcome is Outcome.INFRA:
                if not self._may_try_again(record):
                    raise _gave_up(record)
                raise TryAgain
            self._check_model(record, history)
            if measurement.outcome is not Outcome.CRASHED or history.settled(candidate):
                return record
            self._observer.again(record, 2)

    def give_up(self, candidate: Candidate, history: History, orphan: Claim) -> ProbeRecord:
        """Leave a candidate alone that workers died of: the next one would too, and the one after it."""
        measurement = Measurement(
            Outcome.INFRA,
            self._prober.kind,
            message=f"{orphan.attempt} workers died while they probed it; it is not tried again",
            detail={DEADLY: orphan.attempt},
        )
        return self._keep(candidate, measurement, history, orphan, reuse_key=self.conditions(candidate))

    def confirm(self, candidate: Candidate, history: History, number: int, of: int, claim: Claim) -> ProbeRecord:
        """The longer measurement of a finalist: the one that there is under this protocol, else a new one.

        One that is older than the last probe of the search is made anew: finalists are compared with each other, and
        a machine is not equally fast at all times. A prediction would come out the same again: it stands for itself.

        Args:
            candidate: the finalist.
            history: what is known, kept up to date.
            number: of this confirmation.
            of: about how many there will be.
            claim: on the finals.

        Raises:
            ClaimLost: another worker took this one for dead, and the finals over.
            InfraError: two finalists running could not be measured for reasons of ours.
        """
        known = history.settled(candidate)
        if self._predicts and known is not None:
            return known
        key = self.conditions(candidate, confirmation=True)
        probed = (r.trial for r in history.records if not (r.confirmation or r.inferred or r.reused))
        searched = max(probed, default=0)
        for known in reversed(history.records):
            if (
                known.confirmation
                and known.reuse_key == key
                and known.trial > searched
                and known.measurement.outcome is not Outcome.INFRA
            ):
                return known
        reused = self._store.reusable(key) if searched == 0 else None
        if reused is not None:
            reused.detail.pop(PARITY, None)  # it was compared with another study's reference
            return self._keep(
                candidate, reused, history, claim, release=False, reused=True, confirmation=True, reuse_key=key
            )
        self._infra[candidate] = 0
        request = ProbeRequest(candidate, self._settings.probe.confirm_steps, confirmation=True)
        while True:
            self._observer.confirming(candidate, number, of)
            measurement = self._prober.probe(request)
            record = self._keep(candidate, measurement, history, claim, release=False, confirmation=True, reuse_key=key)
            if record.measurement.outcome is not Outcome.INFRA:
                self._unconfirmed = 0
                return record
            if not self._may_try_again(record):
                self._unconfirmed += 1
                if self._unconfirmed == 2:
                    raise _gave_up(record)
                return record

    def compare(self, candidate: Candidate, history: History, steps: int, claim: Claim) -> ProbeRecord:
        """A probe that is only made to be compared with another: the one that there is, else a new one.

        Args:
            candidate: what to run.
            history: what is known, kept up to date.
            steps: to measure.
            claim: on the finals.

        Raises:
            ClaimLost: another worker took this one for dead, and the finals over.
        """
        key = self.conditions(candidate, steps=steps)
        known = next((r for r in reversed(history.records) if r.confirmation and r.reuse_key == key), None)
        if known is not None and known.measurement.outcome is not Outcome.INFRA:
            return known
        measurement = self._prober.probe(ProbeRequest(candidate, steps, confirmation=True))
        measurement.detail[COMPARISON] = True
        return self._keep(candidate, measurement, history, claim, release=False, confirmation=True, reuse_key=key)

    def look_again(self, stopped: ProbeRecord, history: History, claim: Claim) -> None:
        """Probe a candidate again, to its end, that was stopped while the machine was slow."""
        candidate = stopped.candidate
        self._observer.noticed(f"trial {stopped.trial} was stopped while the machine was slow: it is probed again")
        measurement = self._prober.probe(ProbeRequest(candidate, self._settings.probe.steps))
        self._keep(candidate, measurement, history, claim, release=False, reuse_key=self.conditions(candidate))

    def _keep(
        self,
        candidate: Candidate,
        measurement: Measurement,
        history: History,
        claim: Claim,
        *,
        release: bool = True,
        **marks: Any,
    ) -> ProbeRecord:
        if not marks.get("reused"):
            notice(measurement, history.records, self._observer, self._told)
        marks |= {"optuna_study": self._optuna_study, "worker": self._worker}
        row = probe_row(self._study, candidate, measurement, **marks)
        try:
            record = self._store.add_row(row, claim, release=release)
        except (StoreError, KeyboardInterrupt) as error:
            self._spool(row, claim, error)
            raise
        history.add(record)
        self.kept.add(record.trial)
        self._observer.finished(record)
        return record

    def _spool(self, row: dict[str, Any], claim: Claim, error: StoreError | KeyboardInterrupt) -> None:
        """Keep elsewhere what the store does not take, where a process was started for it."""
        if row["inferred"] or row["reused"]:
            return
        path = spool.keep(self._settings.study_dir, row, claim, digests(self._settings))
        kept = f"what was measured last is kept in {path}, and the same command takes it in"
        if isinstance(error, StoreError):
            raise StoreError(error.message, f"{kept}; {error.hint}") from error
        self._observer.waiting(kept)

    def _may_try_again(self, record: ProbeRecord) -> bool:
        self._infra[record.candidate] += 1
        attempts = self._infra[record.candidate]
        if attempts < INFRA_ATTEMPTS:
            self._observer.again(record, attempts + 1)
        return attempts < INFRA_ATTEMPTS

    def _check_model(self, record: ProbeRecord, history: History) -> None:
        """Stop where a candidate fails just as the first one did, before memory or speed come in, and none has run."""
        first = history.first
        if history.runs or first is None or first.candidate == record.candidate:
            return
        one, two = first.measurement, record.measurement
        both = {one.outcome, two.outcome} <= {Outcome.CRASHED, Outcome.INVALID} and {one.phase, two.phase} <= _EARLY
        if both and _plain(one.message) == _plain(two.message):
            raise SettingsError(
                f"the model itself fails, in {two.phase}: {two.message}",
                "two candidates failed alike and no more were tried; mend the model or its settings",
            )


def _beside(measurement: Measurement, neighbours: int) -> Measurement:
    if not neighbours:
        return measurement
    return replace(measurement, environment=measurement.environment | {NEIGHBOURS: neighbours})


def _gave_up(record: ProbeRecord) -> InfraError:
    return InfraError(
        f"{record.candidate} could not be probed in {INFRA_ATTEMPTS} attempts: {record.measurement.message}",
        "this says nothing about the candidate; everything measured is kept, and the same command goes on",
    )


def _plain(message: str | None) -> str | None:
    """A message without the addresses that differ from process to process."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", message) if message else None


def digests(settings: Settings) -> dict[str, str]:
    """What tells a study's measurements from those of another of its name."""
    return {"workload": settings.workload.digest, "machine": settings.machine.fingerprint}
