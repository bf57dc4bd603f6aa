"""Which candidate comes next: through the whole list, or by one of Optuna's samplers."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import islice

from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from autotune.candidate import Candidate
from autotune.errors import SettingsError

SEARCHES = ("auto", "tpe", "random", "grid", "gp")
STARTUP = 10
"""Candidates taken from the shuffled list before a sampler is asked (a quarter of a smaller budget)."""

EI_CANDIDATES = 100
"""Draws that TPE chooses each proposal from. With Optuna's 24 the worst of ten seeds ended at 72 % of the best of a
space of which two thirds did not fit, with 100 at 89 %; 400 were no better."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a sweep goes through its candidates.

    Attributes:
        name: `list`, `random`, `tpe` or `gp`.
        order: every candidate; where the list is asked, its first untried one is taken.
        startup: how many are taken from the list before the sampler is asked; all of them where there is no model.
    """

    name: str
    order: Sequence[Candidate]
    startup: int

    def sampler(self, seed: int, trials: int, *, shared: bool = False) -> BaseSampler:
        """Optuna's sampler. A sweep that goes on after `trials` trials does not draw the same numbers again.

        Args:
            seed: of the sweep, or of one of its workers.
            trials: how many there are already.
            shared: other workers search at the same time, and propose something else where they know of each other.
        """
        seed = (seed + trials) % 2**32
        if self.name == "tpe":
            return TPESampler(
                seed=seed,
                n_startup_trials=self.startup,
                n_ei_candidates=EI_CANDIDATES,
                multivariate=True,
                group=True,
                constant_liar=shared,  # it costs a write per trial
            )
        if self.name == "gp":
            return GPSampler(seed=seed, n_startup_trials=self.startup)
        return RandomSampler(seed=seed)


class Untried:
    """What is left of a list of candidates; what is settled stays so within a run.

    Args:
        order: the list.
        settled: whether a candidate need not be tried again.
    """

    def __init__(self, order: Sequence[Candidate], settled: Callable[[Candidate], object]) -> None:
        self._order, self._settled = order, settled
        self._next = 0

    def first(self, taken: Container[str] = frozenset()) -> Candidate | None:
        """The first that is neither settled nor, by its key, taken by another worker."""
        while self._next < len(self._order) and self._settled(self._order[self._next]):
            self._next += 1
        rest = islice(self._order, self._next, None)
        return next((c for c in rest if c.key not in taken and not self._settled(c)), None)


def plan(search: str, seed: int, candidates: Sequence[Candidate], baseline: Candidate, budget: int) -> Plan:
    """How to go through the candidates: the baseline first, whatever the search.

    A sampler's list is shuffled, so that what is taken from it is spread over the space.

    Args:
        search: `search.name`.
        seed: of the order and the sampler.
        candidates: those that may be tried, in trying order.
        baseline: the untuned default; it need not be among them.
        budget: processes that may be started.

    Raises:
        SettingsError: the search is unknown, or what it needs is not installed.
    """
    if search not in SEARCHES:
        raise SettingsError(f"search={search} is unknown", f"one of {', '.join(SEARCHES)}")
    if search == "auto":
        search = "grid" if len(candidates) <= budget else "tpe"
    if search == "gp":
        _need("scipy", "torch")
    order = list(candidates)
    if search != "grid":
        random.Random(seed).shuffle(order)
    order.sort(key=lambda candidate: candidate != baseline)  # stable: only the baseline moves
    if search in ("grid", "random"):
        return Plan("list" if search == "grid" else "random", order, len(order))
    return Plan(search, order, max(1, min(STARTUP, budget // 4)))


def _need(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise SettingsError(
            f"search=gp needs {' and '.join(missing)}, not installed here",
            "pip install 'autotune[gp]', or leave it at search=auto",
        )
