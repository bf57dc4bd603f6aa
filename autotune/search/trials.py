"""The Optuna side of a sweep: its study, the knobs as parameters, what happened told as trials."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.candidate import Candidate
from autotune.errors import StoreError
from autotune.search.outcomes import CONSTRAINT, FAILED, Told
from autotune.space.knobs import Value
from autotune.space.space import Space
from autotune.store.records import ProbeRecord

Answer = TypeVar("Answer")


class Retry(Protocol):
    """Asks the storage, again where the connection is lost meanwhile."""

    def __call__(self, ask: Callable[[], Answer]) -> Answer:
        """The answer."""
        ...


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna neither logs nor warns of what is experimental inside the block."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


class Trials:
    """The Optuna study of one space.

    Every knob with more than one choice is a categorical parameter. Ordered numbers as categories cost the sampler
    nothing here (60 probes among 1,026 candidates found the best in 8 of 8 seeds; as integers over the index, 7), and
    people see `micro_batch = 8` in a dashboard instead of an index.

    Args:
        name: of the Optuna study.
        storage: takes it.
        space: whose knobs are its parameters.
        sampler: makes the sampler that proposes, given how many trials there are.
        worker: whose trials those of this process are, by its id.
        retry: asks the storage, again where the connection is lost meanwhile.
    """

    def __init__(
        self,
        name: str,
        storage: BaseStorage,
        space: Space,
        sampler: Callable[[int], BaseSampler],
        worker: str,
        retry: Retry,
    ) -> None:
        self._space = space
        self._distributions: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(choices) for knob, choices in space.knobs.items() if len(choices) > 1
        }
        self._storage, self._sampler, self._worker, self._retry = storage, sampler, worker, retry
        self.study = retry(lambda: self._made(name))
        self._id = retry(lambda: storage.get_study_id_from_name(name))

    def _made(self, name: str) -> optuna.Study:
        study = optuna.create_study(
            storage=self._storage,
            study_name=name,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.NopPruner(),
            direction="maximize",
            load_if_exists=True,
        )
        study.set_metric_names(["log tokens/s"])
        return study

    def recover(
        self, records: list[ProbeRecord], told: Callable[[ProbeRecord], Told], there: Container[str]
    ) -> list[Candidate]:
        """Bring the Optuna study to what the store knows, after whatever happened to an earlier run or another worker.

        A RUNNING trial that has its probe is told; one without, of a worker that is gone, is failed. Settling probes of
        this space that the study lacks (of other spaces, or whose trial was failed) are added as finished trials.

        Args:
            records: the settling probes of this space.
            told: what each becomes in Optuna.
            there: ids of the workers that are at work.

        Returns:
            The candidates of failed trials that are not settled.
        """
        mine = {r.optuna_number: r for r in records if r.optuna_study == self.study.study_name and not r.confirmation}
        settled = {record.candidate for record in records}
        again = []
        for running in self._all((TrialState.RUNNING,)):
            if running.user_attrs.get(WORKER) in there:
                continue
            record = mine.get(running.number)
            self.finish(running.number, told(record) if record is not None else FAILED_TRIAL)
            candidate = self._candidate(running)
            if record is None and candidate is not None and candidate not in settled:
                again.append(candidate)
        known = {self._candidate(trial) for trial in self._finished()}
        for record in records:
            if record.candidate not in known:
                self._add(record, told(record))
        self.study.sampler = self._sampler(len(self._all(None)))
        return again

    def start(self, candidate: Candidate) -> int:
        """A running trial of a candidate, by its number."""
        return self._retry(lambda: self._begin(self._params(candidate), self._distributions)).number

    def ask(self) -> tuple[int, Candidate | None]:
        """A running trial of what the sampler proposes, by its number; None where a rule refuses the combination."""

        def propose() -> tuple[int, Candidate | None]:
            trial = self._begin({}, {})
            raw: dict[str, Value] = {}
            for knob, distribution in self._distributions.items():
                assert isinstance(distribution, CategoricalDistribution)
                raw[knob] = trial.suggest_categorical(knob, distribution.choices)
            return trial.number, self._space.canonical(raw)

        return self._retry(propose)

    def finish(self, number: int, told: Told) -> None:
        """Tell what came of a running trial; nothing happens where it has been told already."""
        self._retry(lambda: self._finish(number, told))

    def drop(self, number: int) -> None:
        """Fail a running trial, unless the storage does not answer at once."""
        with suppress(StoreError):
            self._finish(number, FAILED_TRIAL)

    def _begin(self, params: dict[str, Value], distributions: dict[str, BaseDistribution]) -> Trial:
        """A new trial that is running from the start: what is queued, another worker could take.

        Where the connection is lost in between it stays RUNNING, until this worker is gone and its trials are failed.
        """
        template = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=distributions,
            user_attrs={WORKER: self._worker},
        )
        return Trial(self.study, self._storage.create_new_trial(self._id, template))

    def _finish(self, number: int, told: Told) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        running = self._storage.get_trial(trial_id)
        if running.state.is_finished():
            return
        trial = Trial(self.study, trial_id)
        if told.constraint is not None and CONSTRAINT not in running.constraints:
            trial.set_constraint(CONSTRAINT, told.constraint)
        pruned = told.state is TrialState.PRUNED
        if pruned and told.value is not None and not running.intermediate_values:
            trial.report(told.value, step=0)
        self.study.tell(number, None if pruned else told.value, state=told.state)

    def _add(self, record: ProbeRecord, told: Told) -> None:
        if told.constraint is None:
            return  # nothing that teaches the sampler
        pruned = told.state is TrialState.PRUNED
        trial = create_trial(
            state=told.state,
            value=told.value,
            params=self._params(record.candidate),
            distributions=self._distributions,
            intermediate_values={0: told.value} if pruned and told.value is not None else None,
            constraints={CONSTRAINT: told.constraint},
        )
        self._retry(lambda: self.study.add_trial(trial))

    def _finished(self) -> list[FrozenTrial]:
        return self._all((TrialState.COMPLETE, TrialState.PRUNED))

    def _all(self, states: tuple[TrialState, ...] | None) -> list[FrozenTrial]:
        return self._retry(lambda: self.study.get_trials(deepcopy=False, states=states))

    def _params(self, candidate: Candidate) -> dict[str, Value]:
        raw = self._space.raw(candidate)
        return {knob: raw[knob] for knob in self._distributions}

    def _candidate(self, trial: FrozenTrial) -> Candidate | None:
        """The candidate of a trial; None for a refused one, or one whose parameters are not all drawn."""
        return self._space.canonical(trial.params) if trial.params.keys() == self._distributions.keys() else None


REFUSED = Told(TrialState.PRUNED, None, FAILED)
"""What Optuna is told of a combination that a rule refuses."""

FAILED_TRIAL = Told(TrialState.FAIL, None, None)
"""What Optuna is told of a trial that came to nothing: samplers do not see it."""

WORKER = "worker"
"""The user attribute of a trial that says whose it is."""
