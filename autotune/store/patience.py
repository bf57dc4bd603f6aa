"""Patience with a database that does not answer: what was asked is asked again, for so long and no longer."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from autotune.errors import StoreError
from autotune.store.faults import ConnectionLost

RECONNECT_S = 120.0
"""A server that restarts is back in seconds, one that fails over to another machine in a minute or two."""

_FIRST_S, _LONGEST_S = 0.1, 5.0

Answer = TypeVar("Answer")
Method = TypeVar("Method", bound=Callable[..., Any])


class Patience:
    """Asks again, at growing intervals, where a connection is lost.

    What is asked must be the same when asked twice: nobody knows whether a transaction whose connection broke was
    committed.

    Attributes:
        seconds: how long a database that does not answer is waited for.
        tell: takes a sentence when waiting begins and when it ends.
    """

    def __init__(self, seconds: float = RECONNECT_S) -> None:
        self.seconds = seconds
        self.tell: Callable[[str], None] = lambda sentence: None

    def run(self, ask: Callable[[], Answer]) -> Answer:
        """The answer.

        Raises:
            StoreError: there was none in time, or the database refuses.
        """
        deadline, wait = None, _FIRST_S
        while True:
            try:
                answer = ask()
            except ConnectionLost as lost:
                now = time.monotonic()
                if deadline is None:
                    deadline = now + self.seconds
                    self.tell(f"{lost.message}; it is asked again for {self.seconds:g} s (study.reconnect_s)")
                if now >= deadline:
                    raise StoreError(lost.message, lost.hint) from lost
                time.sleep(min(wait * random.uniform(0.5, 1.0), deadline - now))
                wait = min(wait * 2, _LONGEST_S)
            else:
                if deadline is not None:
                    self.tell("the store answers again")
                return answer


class _Patient(Protocol):
    patience: Patience


def patient(method: Method) -> Method:
    """A method that is asked again while the connection is lost; its object has a `patience`."""

    @functools.wraps(method)
    def asked(self: _Patient, *arguments: Any, **named: Any) -> Any:
        return self.patience.run(lambda: method(self, *arguments, **named))

    return asked  # type: ignore[return-value]  # it has the method's signature
