"""The end of a sweep on stdout: winner, what it gains over the untuned default, the ledger, the files written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from autotune.candidate import varying
from autotune.machine.machine import GIB, Machine
from autotune.probe.measurement import PLANNED, Measurement, Outcome
from autotune.report.notes import parity, remarks
from autotune.report.prediction import ESTIMATE, PROMISE, print_phases
from autotune.report.ratio import throughput_ratio
from autotune.report.units import gib, percent, seconds, throughput, tokens
from autotune.search.history import SLOW_MACHINE
from autotune.search.referee import PARITY
from autotune.search.result import Counts, Result
from autotune.store.records import ProbeRecord


def print_summary(out: TextIO, machine: Machine, result: Result, ledger: str, files: Sequence[Path]) -> None:
    """Print what a sweep found, or what was planned.

    Args:
        out: stdout.
        machine: of the study.
        result: of the search.
        ledger: how the candidates came about.
        files: that were written.
    """
    winner, reference, baseline = result.winner, result.reference, result.baseline
    predicted = winner.measurement.predicted
    lines = [f"{PLANNED.upper()}: every figure here is predicted for {machine.name}"] if predicted else []
    lines += [f"study      {winner.study}: {counts(result)}", f"{'':<11}ended: {result.reason}"]
    names = varying(record.candidate for record in (winner, reference, baseline) if record is not None)
    lines += _about("winner", winner, machine, names)
    if baseline is None or reference.key != baseline.key:
        if baseline is not None:
            lines += _about("baseline", baseline, machine, names, "the untuned default")
        if reference.key != winner.key:
            nearest = "it" if baseline is not None else "the untuned default, which cannot run here"
            lines += _about("reference", reference, machine, names, f"the feasible candidate nearest to {nearest}")
    elif reference.key != winner.key:
        lines += _about("baseline", reference, machine, names, "the untuned default")
    lines += [f"gain       {gain(result)}", *_batches(winner, reference, machine)]
    lines += _parity(result)
    notes = remarks(winner.measurement)
    if reference.key != winner.key and (slower := reference.measurement.detail.get(SLOW_MACHINE)):
        notes.append(f"What it is compared with was measured when the machine was {percent(slower)} slower than usual.")
    lines += [f"{'note':<11}{note}" for note in notes]
    lines.append("")
    out.write("\n".join(lines) + "\n")
    if predicted:
        print_phases(out, winner.measurement.detail["prediction"])
    out.write("\n".join([*ledger.splitlines(), "", *(str(path) for path in files)]) + "\n")


def _batches(winner: ProbeRecord, reference: ProbeRecord, machine: Machine) -> list[str]:
    """A remark where the two train with different global batches: then speed is not all that differs."""
    mine, theirs = (
        r.candidate.micro_batch * r.candidate.accumulation * machine.world_size for r in (winner, reference)
    )
    if mine == theirs:
        return []
    remark = f"the winner takes {mine} sequences per optimizer step, what it is compared with {theirs}"
    return [f"{'':<11}{remark}; workload.global_batch=N fixes it"]


def _parity(result: Result) -> list[str]:
    """What the comparison of losses found: of the winner, and of those that were set aside."""
    lines = []
    if found := result.winner.measurement.detail.get(PARITY):
        lines.append(f"parity     {parity(found)}")
    for record in result.aside:
        reason = record.measurement.detail[PARITY]["reason"]
        lines.append(f"{'' if lines else 'parity':<11}trial {record.trial} would have won and is set aside: {reason}")
    return lines


def counts(result: Result) -> str:
    """What was done, e.g. `12 ok, 5 oom_device (14 probes, 3 inferred, 4 confirmations)`."""
    done = result.counts
    if result.winner.measurement.predicted:
        return _verdicts(done)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in done.outcomes.most_common() if count)
    parts = [f"{done.probed} probes", f"{done.inferred} inferred", f"{done.reused} reused"]
    parts.append(f"{len(result.confirmations)} confirmations")
    return f"{outcomes} ({', '.join(part for part in parts if not part.startswith('0 '))})"


def _verdicts(done: Counts) -> str:
    """What was looked at, e.g. `585 candidates looked at: 210 fit, 12 are at risk, 363 do not fit`."""
    ran = done.outcomes[Outcome.OK.value]
    oom = sum(done.outcomes[outcome.value] for outcome in Outcome if outcome.is_oom)
    total = done.outcomes.total()
    parts = [f"{done.feasible:,} fit", f"{ran - done.feasible:,} are at risk", f"{oom:,} do not fit"]
    if others := total - ran - oom:
        parts.append(f"{others:,} cannot run")
    return f"{total:,} candidates looked at: {', '.join(parts)}"


def gain(result: Result) -> str:
    """What the winner gains over the reference, with its spread."""
    winner, reference = result.winner, result.reference
    if winner.key == reference.key:
        if result.baseline is not None and winner.key == result.baseline.key:
            return "none: the untuned default is the winner"
        return "nothing to compare with: the untuned default does not fit, and the winner is what comes nearest to it"
    ratio = throughput_ratio(winner.measurement, reference.measurement)
    if ratio is not None and winner.measurement.predicted:
        return f"{percent(ratio.value - 1, sign=True)} by the {ESTIMATE}: {PROMISE}"
    if ratio is None:
        return "unknown: no throughput was measured"
    return str(ratio) if ratio.significant is not False else f"no significant difference: {ratio}"


def _about(word: str, record: ProbeRecord, machine: Machine, names: list[str], note: str = "") -> list[str]:
    first = f"{word:<11}{record.candidate.label(names)}  (trial {record.trial}{', ' + note if note else ''})"
    return [first, *(f"{'':<11}{line}" for line in _found(record.measurement, machine))]


def _found(measurement: Measurement, machine: Machine) -> list[str]:
    if not measurement.outcome.measured_memory:
        return [_failed(measurement, machine)]
    lines = []
    if measurement.tokens_per_s is not None:
        each = tokens(measurement.tokens_per_s / machine.world_size)
        how = f" ({ESTIMATE})" if measurement.predicted else ""
        lines.append(f"{throughput(measurement)}, {each} per device, step {seconds(measurement.step_s)}{how}")
    used = measurement.used_bytes
    memory = "device memory unknown"
    if used is not None:
        share = percent(used / machine.device_memory_bytes)
        memory = f"{gib(used)} of {gib(machine.device_memory_bytes)} device memory ({share})"
        if used > machine.usable_bytes:
            memory += f", more than the headroom of {percent(machine.headroom)} leaves"
    host = f", host {gib(measurement.host_peak_bytes)}" if measurement.host_peak_bytes else ""
    return [*lines, memory + host]


def _failed(measurement: Measurement, machine: Machine) -> str:
    text = measurement.outcome.value + (f" in {measurement.phase.value}" if measurement.phase else "")
    if measurement.outcome.is_oom and measurement.needed_bytes:
        on_device = measurement.outcome is Outcome.OOM_DEVICE
        has = machine.device_memory_bytes if on_device else int(machine.host_memory_gib * GIB)
        return f"{text}: it takes at least {gib(measurement.needed_bytes)}, and there are {gib(has)}"
    return f"{text}: {' '.join(measurement.message.split())}" if measurement.message else text
