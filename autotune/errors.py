"""What can go wrong, each with a hint and the exit code that it ends the program with.

    AutotuneError            1  a fault of ours that has a sentence
    ├── SettingsError        2  the settings, an override or a file that the user gave
    ├── NothingFeasible      3  every candidate is known not to run or not to fit
    ├── InfraError           4  a launcher, a port, a process: our trouble, not the candidate's
    └── StoreError           5  the database cannot be reached, read or written

An outcome of a probe (an OOM, a crash of the model) is a Measurement, never an exception.
"""

from __future__ import annotations


class AutotuneError(Exception):
    """A fault that is told in one sentence, with a hint that says what to do.

    Args:
        message: what is wrong, one sentence, no traceback.
        hint: what the reader can do about it; empty when there is nothing to add.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SettingsError(AutotuneError):
    """Raised for settings, overrides, knobs and files that cannot mean anything."""

    exit_code = 2


class NothingFeasible(AutotuneError):
    """Raised when no candidate can run, or none that ran fits."""

    exit_code = 3


class InfraError(AutotuneError):
    """Raised when a probe could not be started or finished for reasons of ours."""

    exit_code = 4


class StoreError(AutotuneError):
    """Raised when the database cannot be reached, read or written, or is not ours."""

    exit_code = 5
