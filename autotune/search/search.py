"""One sweep: candidates proposed, measured, remembered and told, until the budget is out; then the finals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import optuna

from autotune.candidate import Candidate
from autotune.probe.measurement import VIRTUAL
from autotune.probe.prober import Prober
from autotune.search import finals, misses, outcomes
from autotune.search.history import History, speed
from autotune.search.measurer import Measurer, TryAgain
from autotune.search.observer import Observer, Overview
from autotune.search.result import Counts, Result
from autotune.search.samplers import Plan, plan
from autotune.search.trials import REFUSED, Trials, quiet
from autotune.settings import Settings
from autotune.space.space import Space
from autotune.store.records import ProbeRecord, winner_of
from autotune.store.store import Store

REPEATS_IN_A_ROW = 5
PROBES = 40
PREDICTIONS = 1_000
"""What a sweep may spend where budget.probes is null. A prediction takes a thousandth of a probe: with `search=auto`
every candidate of a space of this size is looked at."""


class Search:
    """A sweep over one space of one study.

    Args:
        settings: budget, search, probe, objective and what they are for.
        space: the candidates.
        store: takes every measurement, and Optuna's study.
        prober: measures.
        environment: what else must be equal for a measurement to be reused: versions, threads, allocator settings,
            a digest of a custom model's source.
        observer: is told what happens.
        impossible: why a candidate cannot run at all, one sentence, None where it may. Such
            candidates are never tried.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        space: Space,
        store: Store,
        prober: Prober,
        *,
        environment: Mapping[str, Any] | None = None,
        observer: Observer | None = None,
        impossible: Callable[[Candidate], str | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._space, self._store = settings, space, store
        self._observer = observer or Observer()
        self._clock = clock
        self._study = settings.study_name
        self._predicts = prober.kind == VIRTUAL
        self._budget = settings.budget.probes or (PREDICTIONS if self._predicts else PROBES)
        self._optuna_study = f"{self._study}/{space.digest}" + f"/{VIRTUAL}" * self._predicts
        self._prober = prober
        self._measurer = Measurer(settings, store, prober, environment or {}, self._observer, self._optuna_study)
        reasons = {candidate: impossible(candidate) if impossible else None for candidate in space.candidates}
        self._possible = {candidate: None for candidate, reason in reasons.items() if reason is None}
        self._impossible = Counter(reason for reason in reasons.values() if reason is not None)
        outside = space.baseline not in space and not (impossible and impossible(space.baseline))
        self._outside = space.baseline if outside else None
        self._started = 0.0
        self._next = 0
        self._repeats = self._repeats_in_a_row = 0
        self._again: list[Candidate] = []
        self._reason = ""

    def run(self) -> Result:
        """Search, confirm the best, and say which one wins.

        Raises:
            SettingsError: the study holds another workload or machine, the search cannot be made, or the model itself
                fails.
            NothingFeasible: no candidate can run, or none that ran fits.
            InfraError: a candidate could not be probed for reasons of ours, three times.
            StoreError: the store fails, or another process tunes this study.
            KeyboardInterrupt: the user interrupted; everything measured is stored, and the same call goes on.
        """
        if not self._possible:
            raise misses.nothing_runs(self._impossible, self._space.ledger.summary())
        sampler = self._plan.name
        with quiet(), self._store.faults():
            self._measurer.own()  # before anything of a study that another process tunes is touched
            try:
                self._store.open_study(self._study, self._settings.workload, self._settings.machine)
                self._measurer.own()
                self._started = self._clock()
                self._store.set_baseline(self._study, self._space.baseline.key)
                self._observer.started(self._overview(sampler))
                self._search()
                self._observer.searched(self._reason)
                return self._finals()
            finally:
                self._store.release_owner(self._study)

    @cached_property
    def _plan(self) -> Plan:
        search, budget = self._settings.search, self._budget
        budget -= self._outside is not None  # its probe is one of them
        return plan(search.name, search.seed, list(self._possible), self._space.baseline, budget)

    @cached_property
    def _history(self) -> History:
        probes = self._store.probes(self._study)
        return History(
            [record for record in probes if record.measurement.predicted == self._predicts],
            self._settings.machine,
            self._possible.__contains__,
            self._measurer.conditions,
            self._optuna_study,
        )

    @cached_property
    def _trials(self) -> Trials:
        # Optuna's tables hold what was measured. A prediction is cheaper than the twenty commits of a trial.
        storage = optuna.storages.InMemoryStorage() if self._predicts else self._store.optuna_storage()
        return Trials(self._optuna_study, storage, self._space, self._plan, self._settings.search.seed)

    def _search(self) -> None:
        self._trials.recover(self._history.settling(), self._told)
        self._prepare()
        while self._outside and not self._history.settled(self._outside):
            try:  # it is no combination of this space's knobs, so there is no trial for it
                self._measurer.settle(self._outside, self._history, None, self._left(inside=False))
            except TryAgain:
                continue
        if not self._ended():
            self._line_up()
            self._trials.study.optimize(self._objective, callbacks=[self._after], catch=(TryAgain,))

    def _prepare(self) -> None:
        """Tell the prober what it is going to be asked for, where the whole list is."""
        if self._plan.name == "list":
            untried = [candidate for candidate in self._plan.order if not self._history.settled(candidate)]
            if coming := untried[: self._budget - self._history.spent]:
                self._prober.prepare(coming, self._observer.preparing)

    def _objective(self, trial: optuna.Trial) -> float:
        candidate = self._trials.suggest(trial)
        known = self._history.settled(candidate) if candidate else None
        if candidate is None or candidate not in self._possible or known:
            self._repeats += 1
            self._repeats_in_a_row += 1
            told = REFUSED if known is None else outcomes.Told(REFUSED.state, None, self._told(known).constraint)
            return self._trials.finish(trial, told)
        self._repeats_in_a_row = 0
        try:
            record = self._measurer.settle(candidate, self._history, trial.number, self._left())
        except TryAgain:
            self._again.append(candidate)
            raise
        return self._trials.finish(trial, self._told(record))

    def _after(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if self._ended():
            study.stop()
        else:
            self._line_up()

    def _line_up(self) -> None:
        """Queue what the next trial is to be, where that is not for the sampler to say."""
        if self._trials.waiting():
            return
        if self._again:
            self._trials.enqueue(self._again.pop())
            return
        from_list = self._history.tried < self._plan.startup or self._repeats_in_a_row >= REPEATS_IN_A_ROW
        candidate = self._untried()
        if candidate is not None and (from_list or candidate == self._space.baseline):
            self._trials.enqueue(candidate)

    def _untried(self) -> Candidate | None:
        """The first candidate of the list that is not settled; what is settled stays so within a run."""
        order = self._plan.order
        while self._next < len(order) and self._history.settled(order[self._next]):
            self._next += 1
        return order[self._next] if self._next < len(order) else None

    def _ended(self) -> bool:
        minutes, patience = self._settings.budget.minutes, self._settings.search.patience
        if self._untried() is None:
            self._reason = "every candidate is tried"
        elif self._history.spent >= self._budget:
            self._reason = f"budget.probes={self._budget} is spent"
        elif minutes is not None and self._clock() - self._started >= minutes * 60:
            self._reason = f"budget.minutes={minutes:g} are over"
        elif patience and self._history.since_best >= patience:
            self._reason = f"{patience} probes without a better one (search.patience)"
        return bool(self._reason)

    def _left(self, *, inside: bool = True) -> int:
        """How many more probes there may be after the next, which is of a candidate inside the space or not."""
        untried = len(self._possible) - self._history.tried - inside
        return max(0, min(self._budget - self._history.spent - 1, untried))

    def _finals(self) -> Result:
        history, machine, baseline = self._history, self._settings.machine, self._space.baseline
        untuned = history.settled(baseline)
        reference = [untuned] if self._outside and untuned and outcomes.fits(untuned.measurement, machine) else []
        held = finals.hold(
            history.feasible(),
            reference,
            baseline,
            self._settings.objective.finalists,
            machine,
            lambda candidate, number, of: self._measurer.confirm(candidate, history, number, of),
        )
        if held is None:
            confirmed = [r for r in history.records if r.confirmation and r.candidate in self._possible]
            records = history.settling() + confirmed
            raise misses.nothing_fits(records, self._impossible, machine, self._space.ledger.summary(), self._reason)
        winner = held.finalists[0]
        self._crown(winner)
        confirmations = held.finalists + ([] if held.reference in held.finalists else [held.reference])
        return Result(
            winner=winner,
            reference=held.reference,
            baseline=untuned,
            confirmations=sorted(confirmations, key=speed, reverse=True),
            counts=self._counts(),
            reason=self._reason,
        )

    def _crown(self, winner: ProbeRecord) -> None:
        """Say which probe wins the study: what is planned never takes the place of what was measured."""
        known = winner_of(self._store.study(self._study), self._store.probes(self._study))
        if known is None or known.measurement.predicted or not self._predicts:
            self._store.set_winner(self._study, winner.trial)

    def _overview(self, sampler: str) -> Overview:
        return Overview(
            study=self._study,
            sampler=sampler,
            candidates=len(self._possible),
            tried=self._history.tried,
            impossible=dict(self._impossible),
            budget=self._budget,
            spent=self._history.spent,
            knobs=tuple(name for name, values in self._space.knobs.items() if len(values) > 1),
            ledger=self._space.ledger.summary(),
            predicted=self._predicts,
        )

    def _counts(self) -> Counts:
        records = self._history.settling()
        return Counts(
            outcomes=Counter(record.measurement.outcome.value for record in records),
            probed=self._history.spent,
            inferred=sum(record.inferred for record in records),
            reused=sum(record.reused for record in records),
            repeats=self._repeats,
            feasible=len(self._history.feasible()),
        )

    def _told(self, record: ProbeRecord) -> outcomes.Told:
        settings, worst = self._settings, self._history.worst
        if worst is None:
            worst = outcomes.slowest(record.candidate, settings.workload, settings.machine, settings.probe.deadline_s)
        return outcomes.told(record.measurement, settings.machine, worst, inferred=record.inferred)
