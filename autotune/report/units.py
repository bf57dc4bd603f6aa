"""How numbers are shown to people: GiB with two digits, tokens/s with thousands separators, spreads as ranges."""

from __future__ import annotations

from autotune.machine import machine
from autotune.probe.measurement import PLANNED, VIRTUAL, Measurement

NOTHING = "–"


def gib(size: int | None) -> str:
    """Bytes as `12.34 GiB`; below 1 GiB with three digits after the point."""
    return NOTHING if size is None else machine.gib(size)


def memory(measurement: Measurement) -> str:
    """What a probe used of the device; for an OOM what it takes at least, where that is known."""
    if measurement.outcome.is_oom:
        return f"≥ {gib(measurement.needed_bytes)}" if measurement.needed_bytes else NOTHING
    return gib(measurement.used_bytes)


def tokens(rate: float | None) -> str:
    """Tokens per second as `12,345`; below 100 with one digit after the point."""
    if rate is None:
        return NOTHING
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def marked(label: str, probe_kind: str | None) -> str:
    """A winner's label, marked where it was predicted."""
    return f"{label}  ({PLANNED})" if probe_kind == VIRTUAL else label


def spread(low: float | None, high: float | None) -> str:
    """A spread of tokens per second as `12,100–12,600`; an estimate has none."""
    return NOTHING if low is None or high is None or low == high else f"{tokens(low)}–{tokens(high)}"


def throughput(measurement: Measurement) -> str:
    """`12,345 tokens/s (12,100–12,600)`, or what there is of it."""
    if measurement.tokens_per_s is None:
        return NOTHING
    text = f"{tokens(measurement.tokens_per_s)} tokens/s"
    ends = spread(measurement.tokens_per_s_low, measurement.tokens_per_s_high)
    return text if ends == NOTHING else f"{text} ({ends})"


def seconds(value: float | None) -> str:
    """Seconds as `0.123 s`, `12.3 s`."""
    if value is None:
        return NOTHING
    return f"{value:.3f} s" if value < 10 else f"{value:,.1f} s"


def duration(value: float) -> str:
    """A longer time as `42 s`, `3 min 05 s`, `2 h 04 min`."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(share: float, sign: bool = False) -> str:
    """A share as `12.3 %`; with a sign for gains."""
    return f"{share * 100:{'+' if sign else ''}.1f} %"
