"""How much a sweep may spend, and for which reason its search is over."""

from __future__ import annotations

from collections.abc import Callable

from autotune.search.history import History
from autotune.settings import Settings

PROBES = 40
PREDICTIONS = 1_000
"""What a sweep may spend where budget.probes is null. A prediction takes a thousandth of a probe: with `search=auto`
every candidate of a space of this size is looked at."""


class Budget:
    """The probes, the minutes and the patience of one sweep.

    Args:
        settings: of the sweep.
        predicts: candidates are predicted, not measured.
        clock: monotonic seconds.

    Attributes:
        probes: candidates that may be settled by starting processes, or predicted.
    """

    def __init__(self, settings: Settings, predicts: bool, clock: Callable[[], float]) -> None:
        self.probes = settings.budget.probes or (PREDICTIONS if predicts else PROBES)
        self._minutes, self._patience, self._clock = settings.budget.minutes, settings.search.patience, clock
        self._began = 0.0

    def begin(self) -> None:
        """The minutes run from now on."""
        self._began = self._clock()

    def ended(self, history: History, untried: bool) -> str:
        """Why the search is over, one clause; empty where it is not.

        Args:
            history: what is known.
            untried: whether any candidate is not settled.
        """
        if not untried:
            return "every candidate is tried"
        if history.spent >= self.probes:
            return f"budget.probes={self.probes} is spent"
        if self._minutes is not None and self._clock() - self._began >= self._minutes * 60:
            return f"budget.minutes={self._minutes:g} are over"
        if self._patience and history.since_best >= self._patience:
            return f"{self._patience} probes without a better one (search.patience)"
        return ""

    def left(self, history: History) -> int:
        """How many more probes there may be."""
        return self.probes - history.spent
