"""The Optuna side of a sweep: its study, the knobs as parameters, what happened told as trials."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.candidate import Candidate
from autotune.search.outcomes import CONSTRAINT, FAILED, Told
from autotune.search.samplers import Plan
from autotune.space.knobs import Value
from autotune.space.space import Space
from autotune.store.records import ProbeRecord


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
        plan: whose sampler proposes.
        seed: of that sampler.
    """

    def __init__(self, name: str, storage: BaseStorage, space: Space, plan: Plan, seed: int) -> None:
        self._space = space
        self._distributions: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(choices) for knob, choices in space.knobs.items() if len(choices) > 1
        }
        self._storage = storage
        self.study = optuna.create_study(
            storage=self._storage,
            study_name=name,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.NopPruner(),
            direction="maximize",
            load_if_exists=True,
        )
        self.study.set_metric_names(["log tokens/s"])
        self._plan, self._seed = plan, seed

    def recover(self, records: list[ProbeRecord], told: Callable[[ProbeRecord], Told]) -> None:
        """Bring the Optuna study to what the store knows, after whatever happened to an earlier run.

        A RUNNING trial that has its probe is told; one without is failed, and its candidate queued unless it is
        settled. Settling probes of this space that the study lacks (of other spaces, or whose trial was failed) are
        added as finished trials.

        Args:
            records: the settling probes of this space.
            told: what each becomes in Optuna.
        """
        mine = {r.optuna_number: r for r in records if r.optuna_study == self.study.study_name and not r.confirmation}
        settled = {record.candidate for record in records}
        for running in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            record = mine.get(running.number)
            if record is not None:
                self._tell_running(running, told(record))
                continue
            self.study.tell(running.number, state=TrialState.FAIL)
            candidate = self._candidate(running)
            if candidate is not None and candidate not in settled:
                self.enqueue(candidate)
        known = {self._candidate(trial) for trial in self._finished()}
        for record in records:
            if record.candidate not in known:
                self._add(record, told(record))
        trials = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = self._plan.sampler(self._seed, trials)

    def suggest(self, trial: Trial) -> Candidate | None:
        """The candidate that a trial proposes, None where a rule refuses the combination."""
        raw: dict[str, Value] = {}
        for knob, distribution in self._distributions.items():
            assert isinstance(distribution, CategoricalDistribution)
            raw[knob] = trial.suggest_categorical(knob, distribution.choices)
        return self._space.canonical(raw)

    def enqueue(self, candidate: Candidate) -> None:
        """Let the next trial propose this candidate."""
        self.study.enqueue_trial(self._params(candidate))

    def waiting(self) -> bool:
        """Whether a candidate is queued."""
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def finish(self, trial: Trial, told: Told) -> float:
        """Set the constraint and give the objective's value.

        Raises:
            TrialPruned: where that is what the outcome becomes.
        """
        assert told.constraint is not None
        trial.set_constraint(CONSTRAINT, told.constraint)
        if told.state is TrialState.PRUNED:
            if told.value is not None:
                trial.report(told.value, step=0)
            raise optuna.TrialPruned
        assert told.value is not None
        return told.value

    def _tell_running(self, running: FrozenTrial, told: Told) -> None:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        trial = Trial(self.study, self._storage.get_trial_id_from_study_id_trial_number(study_id, running.number))
        if CONSTRAINT not in running.constraints and told.constraint is not None:
            trial.set_constraint(CONSTRAINT, told.constraint)
        if told.state is TrialState.PRUNED:
            if told.value is not None and not running.intermediate_values:
                trial.report(told.value, step=0)
            self.study.tell(running.number, state=TrialState.PRUNED)
        else:
            self.study.tell(running.number, told.value, state=told.state)

    def _add(self, record: ProbeRecord, told: Told) -> None:
        assert told.constraint is not None
        pruned = told.state is TrialState.PRUNED
        self.study.add_trial(
            create_trial(
                state=told.state,
                value=told.value,
                params=self._params(record.candidate),
                distributions=self._distributions,
                intermediate_values={0: told.value} if pruned and told.value is not None else None,
                constraints={CONSTRAINT: told.constraint},
            )
        )

    def _finished(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _params(self, candidate: Candidate) -> dict[str, Value]:
        raw = self._space.raw(candidate)
        return {knob: raw[knob] for knob in self._distributions}

    def _candidate(self, trial: FrozenTrial) -> Candidate | None:
        """The candidate of a trial; None for a refused one, or one whose parameters are not all drawn."""
        return self._space.canonical(trial.params) if trial.params.keys() == self._distributions.keys() else None


REFUSED = Told(TrialState.PRUNED, None, FAILED)
"""What Optuna is told of a combination that a rule refuses."""
