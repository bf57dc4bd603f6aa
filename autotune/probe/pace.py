"""What the pace of every rank says: which device is slower than its peers, and whether the whole machine is slow now.

The pace is the time that each rank takes for rounds of the same small piece of work, at the same time as the others
and without them (autotune/probe/torchrun/pace.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from autotune.probe.spread import median_spread

SLOWER = 0.15
"""A device or a machine counts as slow when it takes so much more time, as a share."""
LEAST = 3
"""A machine has a usual pace after so many probes."""

Rounds = Sequence[Sequence[float]]
"""Of every rank, the seconds of its rounds."""


def straggler(rounds: Rounds) -> dict[str, Any] | None:
    """The rank that is slowest beside its peers' median, where that is more than noise.

    Returns:
        `rank`, and `slower_by` as a share of the peers' median; None where no rank is slower than them by SLOWER even
        at the fast end of its own spread: a disturbance is over after a few rounds, a throttled clock is not.
    """
    found = None
    for rank, mine in enumerate(rounds):
        peers = [median(others) for peer, others in enumerate(rounds) if peer != rank and others]
        if not (mine and peers):
            continue
        middle, fast, _ = median_spread(mine)
        usual = median(peers)
        slower_by = middle / usual - 1
        if fast > (1 + SLOWER) * usual and (found is None or slower_by > found["slower_by"]):
            found = {"rank": rank, "slower_by": round(slower_by, 3)}
    return found


def pace(rounds: Rounds) -> float | None:
    """Seconds of a round on this machine: the slowest rank's median, which is what a collective waits for."""
    medians = [median(mine) for mine in rounds if mine]
    return max(medians) if medians else None


def slowness(rounds: Rounds, earlier: Sequence[Rounds]) -> float | None:
    """By how much the machine was slower than usual, as a share; None where that is less than SLOWER, or not known.

    Args:
        rounds: of the probe in question.
        earlier: of the study's probes before it, whose median is what is usual.
    """
    before = [seconds for probe in earlier if (seconds := pace(probe)) is not None]
    now = pace(rounds)
    if now is None or len(before) < LEAST:
        return None
    slower_by = now / median(before) - 1
    return round(slower_by, 3) if slower_by > SLOWER else None
