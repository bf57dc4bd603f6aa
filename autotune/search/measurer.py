"""Finding out about one candidate with as little as it takes: inferred, taken over, or probed; then stored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import InfraError, SettingsError
from autotune.probe.measurement import VIRTUAL, Measurement, Outcome
from autotune.probe.prober import Prober, ProbeRequest
from autotune.search.frontier import inferred
from autotune.search.history import History, speed
from autotune.search.observer import Observer
from autotune.settings import Settings
from autotune.store.owner import LEASE_S
from autotune.store.records import ProbeRecord
from autotune.store.reuse import reuse_key
from autotune.store.store import Store
from autotune.workload.phase import Phase

INFRA_ATTEMPTS = 3
_EARLY = frozenset({Phase.LOAD, Phase.INIT, Phase.FORWARD})


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
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        prober: Prober,
        environment: Mapping[str, Any],
        observer: Observer,
        optuna_study: str,
    ) -> None:
        self._settings, self._store, self._prober = settings, store, prober
        self._environment, self._observer = environment, observer
        self._study, self._optuna_study = settings.study_name, optuna_study
        self._predicts = prober.kind == VIRTUAL
        self._infra: Counter[Candidate] = Counter()
        self._unconfirmed = 0

    def own(self) -> None:
        """Claim the study, or renew the claim, for longer than the next probe can take.

        Raises:
            StoreError: another process tunes it.
        """
        probe = self._settings.probe
        longest = probe.deadline_s * max(1.0, probe.confirm_steps / probe.steps)
        self._store.claim_owner(self._study, max(LEASE_S, 2 * longest))

    def conditions(self, candidate: Candidate, *, confirmation: bool = False) -> str:
        """The reuse key under which this sweep measures a candidate."""
        settings, probe = self._settings, self._settings.probe
        protocol = {
            "warmup_steps": probe.warmup_steps,
            "steps": probe.confirm_steps if confirmation else probe.steps,
            "threads": probe.threads,
            "confirmation": confirmation,  # accumulation in full, nothing ends it early
        }
        return reuse_key(
            candidate,
            settings.workload,
            settings.machine,
            self._prober.kind,
            settings.launcher.name,
            protocol,
            self._environment,
        )

    def settle(self, candidate: Candidate, history: History, number: int | None, left: int) -> ProbeRecord:
        """Find out about a candidate for the search.

        Args:
            candidate: one that is not settled.
            history: what is known, kept up to date.
            number: of the Optuna trial that asks, None where none does.
            left: how many more probes there may be after this one.

        Returns:
            The probe that settles the candidate.

        Raises:
            TryAgain: the probe failed for reasons of ours.
            InfraError: so did the two before it.
            SettingsError: it fails just as the first candidate did: the model itself fails.
        """
        source = history.frontier.source(candidate)
        if source is not None and not self._predicts:
            return self._keep(candidate, inferred(source), history, inferred=True, optuna_number=number)
        key = self.conditions(candidate)
        reused = self._store.reusable(key)
        if reused is not None:
            return self._keep(candidate, reused, history, reused=True, reuse_key=key, optuna_number=number)
        while True:
            self.own()
            self._observer.probing(candidate, history.spent + 1, left)
            enough = speed(history.best) if self._settings.probe.stop_losers and history.best else None
            request = ProbeRequest(candidate, self._settings.probe.steps, stop_below_tokens_per_s=enough)
            measurement = self._prober.probe(request)
            record = self._keep(candidate, measurement, history, reuse_key=key, optuna_number=number)
            if measurement.outcome is Outcome.INFRA:
                if not self._may_try_again(record):
                    raise _gave_up(record)
                raise TryAgain
            self._check_model(record, history)
            if measurement.outcome is not Outcome.CRASHED or history.settled(candidate):
                return record
            self._observer.again(record, 2)

    def confirm(self, candidate: Candidate, history: History, number: int, of: int) -> ProbeRecord:
        """The longer measurement of a finalist: the one that there is under this protocol, else a new one.

        One that is older than the last probe of the search is made anew: finalists are compared with each other, and
        a machine is not equally fast at all times. A prediction would come out the same again: it stands for itself.

        Args:
            candidate: the finalist.
            history: what is known, kept up to date.
            number: of this confirmation.
            of: about how many there will be.

        Raises:
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
            return self._keep(candidate, reused, history, reused=True, confirmation=True, reuse_key=key)
        self._infra[candidate] = 0
        request = ProbeRequest(candidate, self._settings.probe.confirm_steps, confirmation=True)
        while True:
            self.own()
            self._observer.confirming(candidate, number, of)
            record = self._keep(candidate, self._prober.probe(request), history, confirmation=True, reuse_key=key)
            if record.measurement.outcome is not Outcome.INFRA:
                self._unconfirmed = 0
                return record
            if not self._may_try_again(record):
                self._unconfirmed += 1
                if self._unconfirmed == 2:
                    raise _gave_up(record)
                return record

    def _keep(self, candidate: Candidate, measurement: Measurement, history: History, **marks: Any) -> ProbeRecord:
        record = self._store.add_probe(self._study, candidate, measurement, optuna_study=self._optuna_study, **marks)
        history.add(record)
        self._observer.finished(record)
        return record

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


def _gave_up(record: ProbeRecord) -> InfraError:
    return InfraError(
        f"{record.candidate} could not be probed in {INFRA_ATTEMPTS} attempts: {record.measurement.message}",
        "this says nothing about the candidate; everything measured is kept, and the same command goes on",
    )


def _plain(message: str | None) -> str | None:
    """A message without the addresses that differ from process to process."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", message) if message else None
