"""When nothing is feasible: what each limit removed, and the nearest miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autotune.errors import NothingFeasible
from autotune.machine.machine import Machine, gib
from autotune.probe.measurement import Outcome
from autotune.store.records import ProbeRecord

_REMEDY = (
    "list more offload or checkpointing in space.…, shorten workload.seq_len, or name a larger machine with machine=…"
)
_ELSEWHERE = "name the machine that it is for with machine=…, or list other choices in space.…"


def nothing_runs(impossible: Counter[str], ledger: str) -> NothingFeasible:
    """The error for a space in which no candidate can run at all.

    Args:
        impossible: candidates by the reason why they cannot run, never empty.
        ledger: how the candidates came about.
    """
    reason, _ = impossible.most_common(1)[0]
    removed = [f"{count:,} {sentence}" for sentence, count in impossible.most_common(5)] if len(impossible) > 1 else []
    return NothingFeasible(
        f"none of the {impossible.total():,} candidates can run: {reason}",
        "\n".join(
            ["name the machine that it is for with machine=…, or list other choices in space.…", *removed, ledger]
        ),
    )


def nothing_fits(
    records: Sequence[ProbeRecord], impossible: Counter[str], machine: Machine, ledger: str, reason: str
) -> NothingFeasible:
    """The error for a search in which nothing that ran is feasible.

    Args:
        records: the settling probes of the sweep, and confirmations.
        impossible: candidates that were never tried, by reason.
        machine: whose memory, less headroom, is the limit.
        ledger: how the candidates came about.
        reason: why the search ended.
    """
    if not records:
        return NothingFeasible(f"nothing was tried: {reason}", "raise budget.probes or budget.minutes")
    limits = Counter(_limit(record) for record in records)
    lines = [f"{count:,} {limit}" for limit, count in limits.most_common()]
    lines += [f"{count:,} not tried: {sentence}" for sentence, count in impossible.most_common(5)]
    miss = nearest_miss(records, machine)
    if miss is None:
        messages = Counter(r.measurement.message for r in records if r.measurement.message)
        common = f"; most often: {messages.most_common(1)[0][0]}" if messages else ""
        sentence = f"none of the {len(records)} candidates tried is feasible{common}"
    else:
        record, need = miss
        atleast = "at least " if record.measurement.outcome.is_oom else ""
        sentence = (
            f"none of the {len(records)} candidates tried is feasible; the nearest ({record.candidate}) needs "
            f"{atleast}{gib(need)} of the {gib(machine.usable_bytes)} per device that may be used"
        )
    limit = f"{gib(machine.device_memory_bytes)} per device, {machine.headroom:.0%} of it left free (machine.headroom)"
    return NothingFeasible(sentence, "\n".join([_REMEDY, limit, *lines, ledger]))


def nearest_miss(records: Sequence[ProbeRecord], machine: Machine) -> tuple[ProbeRecord, int] | None:
    """The candidate that overruns the device's memory least, and what it needs, bytes; None where no need is known."""
    needs = []
    for record in records:
        measurement = record.measurement
        device_oom = measurement.outcome is Outcome.OOM_DEVICE
        need = measurement.needed_bytes if device_oom else measurement.used_bytes
        if (device_oom or measurement.outcome.measured_memory) and need is not None and need > machine.usable_bytes:
            needs.append((record, need))
    return min(needs, key=lambda item: item[1], default=None)


def _limit(record: ProbeRecord) -> str:
    if record.measurement.outcome is Outcome.OK:
        ran = "would run, but leave" if record.measurement.predicted else "ran, but left"
        return f"{ran} too little memory free"
    how = " (inferred from a smaller micro-batch)" if record.inferred else ""
    return f"{record.measurement.outcome.value}{how}"
