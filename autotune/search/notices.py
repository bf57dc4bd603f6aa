"""What a measurement says of the devices it was made on: noted with it, and told once."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.probe.measurement import Measurement
from autotune.probe.pace import slowness
from autotune.search.history import SLOW_MACHINE
from autotune.search.observer import Observer
from autotune.store.records import ProbeRecord

PACE = "pace_s"
STRAGGLER = "straggler"
SET_ASIDE = "set_aside"
"""Of a measurement's detail: the rounds of every rank's pace, the rank that is slower than its peers, and a sentence
for each device that has not given its memory back."""


def notice(measurement: Measurement, earlier: Iterable[ProbeRecord], observer: Observer, told: set[int]) -> None:
    """Note in the detail of a new measurement that the machine was slow, and tell of a rank that is.

    Args:
        measurement: new, not stored yet.
        earlier: probes of the study.
        observer: is told of each rank once.
        told: the ranks that it has been told of; kept up to date.
    """
    detail = measurement.detail
    if PACE in detail:
        before = [r.measurement.detail[PACE] for r in earlier if PACE in r.measurement.detail and not r.reused]
        if slow := slowness(detail[PACE], before):
            detail[SLOW_MACHINE] = slow
    for sentence in detail.get(SET_ASIDE, []):
        observer.noticed(sentence)
    if (straggler := detail.get(STRAGGLER)) and straggler["rank"] not in told:
        told.add(straggler["rank"])
        observer.noticed(lagging(measurement))


def lagging(measurement: Measurement) -> str:
    """The sentence that names the rank that was slower than its peers; empty where none was."""
    if not (straggler := measurement.detail.get(STRAGGLER)):
        return ""
    return (
        f"rank {straggler['rank']} (device {straggler['device']} of node {straggler['node']}) is "
        f"{straggler['slower_by'] * 100:.0f} % slower than its peers at the same work, and all of them wait for it"
    )
