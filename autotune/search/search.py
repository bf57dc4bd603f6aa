"""One sweep: candidates proposed, measured, remembered and told, until the budget is out; then the finals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import optuna

from autotune.candidate import Candidate
from autotune.errors import InfraError, SettingsError
from autotune.probe.measurement import VIRTUAL
from autotune.probe.prober import Prober
from autotune.search import finals, misses, outcomes
from autotune.search.budget import Budget
from autotune.search.history import History, speed
from autotune.search.idle import Idle
from autotune.search.measurer import Measurer, TryAgain, Turn, digests
from autotune.search.observer import Observer, Overview
from autotune.search.referee import Referee
from autotune.search.result import Counts, Result
from autotune.search.samplers import Plan, Untried, plan
from autotune.search.trials import FAILED_TRIAL, REFUSED, Trials, quiet
from autotune.settings import Settings
from autotune.space.space import Space
from autotune.store import spool
from autotune.store.claims import Claim, ClaimLost, Refused
from autotune.store.crew import NOBODY, View
from autotune.store.records import ProbeRecord
from autotune.store.store import Store

REPEATS_IN_A_ROW = 5


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
        self._study = settings.study_name
        self._predicts = prober.kind == VIRTUAL
        self._budget = Budget(settings, self._predicts, clock)
        self._optuna_study = f"{self._study}/{space.digest}" + f"/{VIRTUAL}" * self._predicts
        self._prober = prober
        self._crew = store.crew(self._study)
        self._measurer = Measurer(
            settings, store, prober, environment or {}, self._observer, self._optuna_study, str(self._crew.me)
        )
        reasons = {candidate: impossible(candidate) if impossible else None for candidate in space.candidates}
        self._possible = {candidate: None for candidate, reason in reasons.items() if reason is None}
        self._impossible = Counter(reason for reason in reasons.values() if reason is not None)
        outside = space.baseline not in space and not (impossible and impossible(space.baseline))
        self._outside = space.baseline if outside else None
        self._by_key = {candidate.key: candidate for candidate in [*self._possible, *([space.baseline] * outside)]}
        self._repeats = self._repeats_in_a_row = 0
        self._again: list[Candidate] = []
        self._seen = 0
        self._alone = False
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
        self._store.patience.tell = self._observer.waiting
        with quiet(), self._store.faults():
            self._crew.join()  # before anything of a study that another process tunes is touched
            try:
                self._store.open_study(self._study, self._settings.workload, self._settings.machine)
                if taken := spool.take_in(self._settings.study_dir, self._store, digests(self._settings)):
                    self._observer.waiting(f"{taken} measurements that an earlier run kept in a file are in the store")
                self._budget.begin()
                self._store.set_baseline(self._study, self._space.baseline.key)
                self._observer.started(self._overview(sampler))
                while True:
                    self._search()
                    self._observer.searched(self._reason)
                    if (result := self._finish()) is not None:
                        return result
            finally:
                self._crew.leave()

    @cached_property
    def _plan(self) -> Plan:
        search, budget = self._settings.search, self._budget.probes
        budget -= self._outside is not None  # its probe is one of them
        return plan(search.name, search.seed, list(self._possible), self._space.baseline, budget)

    @cached_property
    def _history(self) -> History:
        probes = self._store.probes(self._study)
        self._seen = probes[-1].trial if probes else 0
        return History(
            [record for record in probes if record.measurement.predicted == self._predicts],
            self._settings.machine,
            self._possible.__contains__,
            self._measurer.same_conditions,
            self._optuna_study,
        )

    @cached_property
    def _trials(self) -> Trials:
        # Optuna's tables hold what was measured. A prediction is cheaper than the twenty commits of a trial.
        storage = optuna.storages.InMemoryStorage() if self._predicts else self._store.optuna_storage()
        seed, shared = self._settings.search.seed, self._shared
        if shared:  # workers that draw the same numbers would propose the same candidates
            seed += int(self._crew.me.id[:8], 16)
        return Trials(
            self._optuna_study,
            storage,
            self._space,
            lambda trials: self._plan.sampler(seed, trials, shared=shared),
            self._crew.me.id,
            self._store.retry,
        )

    @cached_property
    def _untried(self) -> Untried:
        return Untried(self._plan.order, self._history.settled)

    @property
    def _shared(self) -> bool:
        """Whether other workers may search at the same time."""
        return not self._predicts and (not self._store.is_file or self._settings.probe.parallel > 1)

    def _search(self) -> None:
        self._crew.begin(self._optuna_study, f"/{VIRTUAL}" * self._predicts)
        self._crew.look()  # who died before is buried, and nobody's trials are theirs
        self._recover()
        self._prepare()
        idle = Idle(self._observer)
        while True:
            self._catch_up()
            view = self._look()
            if view.buried:
                self._recover()
            if not self._outside_waits(view) and self._ended():
                return
            if self._advance(view):
                idle.over()
            else:
                idle.wait(f"waiting for {view.in_flight} probes of other workers")

    def _look(self) -> View:
        """How things stand with the other workers; nobody joins one command on a file, so one look is enough there."""
        if self._alone:
            return NOBODY
        view = self._mourned(self._crew.look())
        self._alone = self._store.is_file and self._settings.probe.parallel == 1 and not view.orphans
        return view

    def _mourned(self, view: View) -> View:
        for name in view.buried:
            self._observer.waiting(f"worker {name} has died; what it was at is tried once more")
        return view

    def _recover(self, *, over: bool = False) -> None:
        """Bring Optuna's study up to date; where the search is over for all, no trial of it is running."""
        with self._crew.mending():
            self._catch_up()
            there = () if over else self._crew.there()
            self._again += self._trials.recover(self._history.settling(), self._told, there)

    def _catch_up(self) -> None:
        """Take in what other workers have stored."""
        history = self._history
        if self._alone:
            self._seen = max(self._seen, history.records[-1].trial if history.records else 0)
            return
        for record in self._store.probes(self._study, after=self._seen):
            self._seen = record.trial
            if record.trial not in self._measurer.kept and record.measurement.predicted == self._predicts:
                history.add(record)
                self._observer.elsewhere(record)

    def _prepare(self) -> None:
        """Tell the prober what it is going to be asked for, where the whole list is."""
        if self._plan.name == "list":
            untried = [candidate for candidate in self._plan.order if not self._history.settled(candidate)]
            if coming := untried[: self._budget.left(self._history)]:
                self._prober.prepare(coming, self._observer.preparing)

    def _advance(self, view: View) -> bool:
        """Find out about one candidate; False where there is none to be had for now."""
        for orphan in view.orphans:
            if (candidate := self._by_key.get(orphan.key)) is not None:
                if not self._history.settled(candidate):
                    return self._try(candidate, view)
                self._crew.release(orphan)
        if self._outside_waits(view) and self._outside:
            return self._try(self._outside, view)
        while self._again:
            candidate = self._again.pop()
            if candidate.key not in view.taken and not self._history.settled(candidate):
                return self._try(candidate, view)
        candidate = self._untried.first(view.taken)
        if candidate is None:
            return False
        from_list = self._history.tried + view.in_flight < self._plan.startup
        if from_list or self._repeats_in_a_row >= REPEATS_IN_A_ROW or candidate == self._space.baseline:
            return self._try(candidate, view)
        return self._propose(view)

    def _try(self, candidate: Candidate, view: View) -> bool:
        """Probe a candidate that we chose."""
        claim = self._claim(candidate, view)
        if isinstance(claim, Claim):
            inside = candidate in self._possible  # else it is no combination of this space's knobs, and has no trial
            self._measure(candidate, claim, self._trials.start(candidate) if inside else None, view)
        return claim is not Refused.FULL

    def _propose(self, view: View) -> bool:
        """Probe what the sampler proposes."""
        number, candidate = self._trials.ask()
        if candidate is None or candidate not in self._possible:
            return self._repeat(number, REFUSED)
        claim: Claim | Refused = Refused.STALE
        while claim is Refused.STALE:
            self._catch_up()
            if known := self._history.settled(candidate):
                return self._repeat(number, outcomes.Told(REFUSED.state, None, self._told(known).constraint))
            claim = self._claim(candidate, view)
        if isinstance(claim, Claim):
            self._measure(candidate, claim, number, view)
            return True
        if claim is Refused.FULL:
            self._trials.finish(number, FAILED_TRIAL)
            return False
        return self._repeat(number, FAILED_TRIAL)  # another worker is at it: nothing is known of it yet

    def _repeat(self, number: int, told: outcomes.Told) -> bool:
        """A proposal that is not to be probed."""
        self._repeats += 1
        self._repeats_in_a_row += 1
        self._trials.finish(number, told)
        return True

    def _claim(self, candidate: Candidate, view: View) -> Claim | Refused:
        claim = self._crew.claim_probe(candidate.key, self._seen, self._budget.left(self._history))
        if claim is Refused.DEADLY:
            orphan = next((orphan for orphan in view.orphans if orphan.key == candidate.key), None)
            if orphan is not None:
                with suppress(ClaimLost):  # another worker has given it up already
                    self._measurer.give_up(candidate, self._history, orphan)
        return claim

    def _measure(self, candidate: Candidate, claim: Claim, number: int | None, view: View) -> None:
        self._repeats_in_a_row = 0
        turn = Turn(
            claim,
            self._left(view.in_flight, inside=number is not None),
            view.in_flight,
            0 if self._predicts else max(view.neighbours, self._settings.probe.parallel - 1),
        )
        try:
            record = self._measurer.settle(candidate, self._history, number, turn)
        except TryAgain:
            self._again.append(candidate)
        except ClaimLost:
            self._observer.waiting(f"other workers took this one for dead, so what it measured is dropped: {candidate}")
        except (InfraError, SettingsError, KeyboardInterrupt):
            if number is not None:
                self._trials.drop(number)
            raise
        else:
            if number is not None:
                self._trials.finish(number, self._told(record))
            return
        if number is not None:
            self._trials.finish(number, FAILED_TRIAL)

    def _outside_waits(self, view: View) -> bool:
        """Whether the baseline lies outside of the space and nobody has come to it."""
        outside = self._outside
        open_to_all = outside is not None and outside.key not in view.taken and not self._history.settled(outside)
        return open_to_all and self._budget.left(self._history) > 0

    def _ended(self) -> bool:
        self._reason = self._budget.ended(self._history, untried=self._untried.first() is not None)
        return bool(self._reason)

    def _left(self, in_flight: int, *, inside: bool) -> int:
        """How many more probes there may be after the next, which is of a candidate inside the space or not."""
        untried = len(self._possible) - self._history.tried - inside
        return max(0, min(self._budget.left(self._history) - 1, untried) - in_flight)

    def _finish(self) -> Result | None:
        """The finals, held by one worker at a time: what one has confirmed, the next finds in the store.

        None where a worker has died meanwhile: what it was probing is to be searched on.
        """
        self._crew.end_search()
        idle = Idle(self._observer)
        while True:
            claim = self._crew.claim_finals()
            if claim is None:
                if self._mourned(self._crew.look()).buried:
                    return None
                idle.wait("waiting for other workers to end their search or their finals")
                continue
            try:
                self._recover(over=True)
                result = self._finals(claim)
                self._crew.release(claim)  # where they come to nothing, leaving gives it back
                return result
            except ClaimLost:
                self._observer.waiting("other workers took this one for dead, and the finals over")

    def _finals(self, claim: Claim) -> Result:
        history, machine, baseline = self._history, self._settings.machine, self._space.baseline
        untuned = history.settled(baseline)
        reference = [untuned] if self._outside and untuned and outcomes.fits(untuned.measurement, machine) else []

        def compare(candidate: Candidate, steps: int) -> ProbeRecord:
            return self._measurer.compare(candidate, history, steps, claim)

        for stopped in history.doubtful():
            self._measurer.look_again(stopped, history, claim)
        held = finals.hold(
            history.feasible(),
            reference,
            baseline,
            self._settings.objective.finalists,
            machine,
            lambda candidate, number, of: self._measurer.confirm(candidate, history, number, of, claim),
            Referee(machine, self._store, compare, self._observer.noticed).compare,
        )
        if held is None:
            confirmed = [r for r in history.records if r.confirmation and r.candidate in self._possible]
            records = history.settling() + confirmed
            raise misses.nothing_fits(records, self._impossible, machine, self._space.ledger.summary(), self._reason)
        winner = held.finalists[0]
        finals.crown(self._store, winner)
        confirmations = held.finalists + ([] if held.reference in held.finalists else [held.reference])
        return Result(
            winner=winner,
            reference=held.reference,
            baseline=untuned,
            confirmations=sorted(confirmations, key=speed, reverse=True),
            aside=held.aside,
            counts=Counts.of(history, self._repeats),
            reason=self._reason,
        )

    def _overview(self, sampler: str) -> Overview:
        return Overview(
            study=self._study,
            sampler=sampler,
            candidates=len(self._possible),
            tried=self._history.tried,
            impossible=dict(self._impossible),
            budget=self._budget.probes,
            spent=self._history.spent,
            knobs=tuple(name for name, values in self._space.knobs.items() if len(values) > 1),
            ledger=self._space.ledger.summary(),
            predicted=self._predicts,
        )

    def _told(self, record: ProbeRecord) -> outcomes.Told:
        return outcomes.of_record(record, self._settings, self._history.worst)
