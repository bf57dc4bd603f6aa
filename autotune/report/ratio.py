"""One throughput over another, with its spread, and whether the difference is real."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.probe.measurement import Measurement
from autotune.report.units import percent


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians; low and high are the ends of the two spreads, None where one has none."""

    value: float
    low: float | None
    high: float | None

    @property
    def significant(self) -> bool | None:
        """Whether the spreads do not overlap; None where they are not known."""
        if self.low is None or self.high is None:
            return None
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        text = percent(self.value - 1, sign=True)
        if self.low is None or self.high is None:
            return f"{text}, and no spread is known"
        return f"{text} ({percent(self.low - 1, sign=True)} to {percent(self.high - 1, sign=True)})"


def throughput_ratio(
    ours: Measurement, theirs: Measurement, our_devices: int = 1, their_devices: int = 1
) -> Ratio | None:
    """Our tokens per second and device over theirs; None where one has no throughput. An estimate has no spread."""
    if ours.tokens_per_s is None or theirs.tokens_per_s is None:
        return None
    devices = their_devices / our_devices
    low = high = None
    if ours.predicted or theirs.predicted:
        return Ratio(ours.tokens_per_s / theirs.tokens_per_s * devices, low, high)
    if ours.tokens_per_s_low is not None and theirs.tokens_per_s_high is not None:
        low = ours.tokens_per_s_low / theirs.tokens_per_s_high * devices
    if ours.tokens_per_s_high is not None and theirs.tokens_per_s_low is not None:
        high = ours.tokens_per_s_high / theirs.tokens_per_s_low * devices
    return Ratio(ours.tokens_per_s / theirs.tokens_per_s * devices, low, high)
