"""The phases of a training run, from building the model to the optimizer step."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where in a probe something happened; the order is the order of a probe."""

    LOAD = "load"
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
