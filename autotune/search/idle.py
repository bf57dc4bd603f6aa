"""Waiting for other workers: said once, and looked again at growing intervals."""

from __future__ import annotations

import time

from autotune.search.observer import Observer

_FIRST_S, _LONGEST_S = 0.05, 2.0


class Idle:
    """A worker that has nothing to do for now.

    Args:
        observer: is told why.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._said, self._pause = "", _FIRST_S

    def wait(self, why: str) -> None:
        """Pause a moment."""
        if why != self._said:
            self._observer.waiting(why)
            self._said = why
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, _LONGEST_S)

    def over(self) -> None:
        """There was something to do."""
        self._said, self._pause = "", _FIRST_S
