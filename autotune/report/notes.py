"""What should be known of a measurement beside its figures, in sentences: risks, devices, whether it trains right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.probe.measurement import Measurement
from autotune.search.history import SLOW_MACHINE
from autotune.search.notices import lagging
from autotune.search.referee import PARITY


def remarks(measurement: Measurement) -> list[str]:
    """Warnings that belong to a winner; empty where there are none."""
    found = [f"At risk: {measurement.at_risk}." if measurement.at_risk else ""]
    if slow := lagging(measurement):
        found.append(f"When this was measured, {slow}.")
    if slower := measurement.detail.get(SLOW_MACHINE):
        found.append(f"When this was measured, the machine was {slower * 100:.0f} % slower than usual.")
    found += [f"Found before the study: {sentence}." for sentence in measurement.detail.get("devices", [])]
    compared = measurement.detail.get(PARITY)
    if compared and not compared["agrees"]:
        found.append(f"Losses: {compared['reason']}.")
    return [sentence for sentence in found if sentence]


def parity(found: Mapping[str, Any]) -> str:
    """What a comparison with the reference found, e.g. `losses agree with the reference's to 0.02 % over 18 steps`."""
    if not found["agrees"]:
        return str(found["reason"])
    worst = max(found["first_loss"], found["loss"])
    norms = f", gradient norms to {share(found['norm'])}" if found["norm"] is not None else ""
    return f"losses agree with the reference's to {share(worst)} over {found['steps']} steps{norms}"


def share(value: float) -> str:
    """A small share in percent, with two digits: `0.02 %`, `0.00053 %`."""
    return f"{float(f'{value * 100:.2g}'):.10f}".rstrip("0").rstrip(".") + " %"
