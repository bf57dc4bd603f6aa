"""What the store holds, listed: the studies, and the trials of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, TextIO

from autotune.candidate import Candidate, varying
from autotune.probe.measurement import Outcome
from autotune.report.output import console_for, print_csv, print_json, print_table
from autotune.report.units import NOTHING, gib, marked, memory, seconds, spread, tokens
from autotune.search.history import SLOW_MACHINE
from autotune.search.notices import STRAGGLER
from autotune.search.referee import COMPARISON, PARITY, set_aside
from autotune.store.records import ProbeRecord, StudyRecord, winner_of
from autotune.store.store import Store

NARROW = 140
"""Below so many columns of a terminal, the table of trials leaves out what is not needed to choose one."""
STUDY_COLUMNS = [
    "study",
    "model",
    "machine",
    "nodes",
    "devices_per_node",
    "trials",
    "ok",
    "oom",
    "other",
    "predicted",
    "winner_trial",
    "winner",
    "winner_probe_kind",
    "tokens_per_s",
    "created",
]
TRIAL_COLUMNS = [
    "trial",
    "key",
    "candidate",
    "outcome",
    "phase",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "step_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_total_bytes",
    "host_peak_bytes",
    "at_risk",
    "straggler",
    "slow_machine",
    "parity",
    "worst_rank",
    "probe_kind",
    "wall_s",
    "overhead_s",
    "inferred",
    "reused",
    "confirmation",
    "winner",
    "message",
    "created",
]


def list_studies(store: Store, form: str, out: TextIO) -> None:
    """Print every study of a store.

    Args:
        store: open, for reading.
        form: table, json or csv.
        out: stdout.
    """
    rows = [study_row(study, store.probes(study.name)) for study in store.studies()]
    if form == "json":
        print_json(out, rows)
    elif form == "csv":
        print_csv(out, STUDY_COLUMNS, rows)
    else:
        headings = ["study", "model", "machine", "devices", "trials", "ok", "oom", "other", "tokens/s", "winner"]
        print_table(out, headings, [_study_cells(row) for row in rows])


def list_trials(store: Store, study: str, form: str, out: TextIO) -> None:
    """Print every trial of a study, in order.

    Args:
        store: open, for reading.
        study: its name.
        form: table, json or csv.
        out: stdout.

    Raises:
        SettingsError: there is no such study.
    """
    record = store.study(study)
    probes = store.probes(study)
    rows = [trial_row(probe, record.winner_trial) for probe in probes]
    if form == "json":
        print_json(out, rows)
    elif form == "csv":
        print_csv(out, TRIAL_COLUMNS, rows)
    else:
        headings = ["trial", "candidate", "outcome", "tokens/s", "spread", "step", "memory", "host", "probe", "wall"]
        names = varying(probe.candidate for probe in probes)
        rows_shown = [trial_cells(probe, record.winner_trial, names) for probe in probes]
        columns = [*headings, ""]
        if console_for(out).width < NARROW:
            kept = [columns.index(name) for name in ("trial", "candidate", "outcome", "tokens/s", "memory", "")]
            columns, rows_shown = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows_shown]
        print_table(out, columns, rows_shown)


def study_row(study: StudyRecord, probes: list[ProbeRecord]) -> dict[str, Any]:
    """A study as JSON has it; outcomes are counted over its trials, confirmations and predictions included."""
    outcomes = Counter(probe.measurement.outcome for probe in probes)
    oom = sum(count for outcome, count in outcomes.items() if outcome.is_oom)
    winner = winner_of(study, probes)
    return {
        "study": study.name,
        "model": study.workload.model.name,
        "machine": study.machine.name,
        "nodes": study.machine.nodes,
        "devices_per_node": study.machine.devices_per_node,
        "trials": len(probes),
        "ok": outcomes[Outcome.OK],
        "oom": oom,
        "other": len(probes) - outcomes[Outcome.OK] - oom,
        "predicted": sum(probe.measurement.predicted for probe in probes),
        "winner_trial": study.winner_trial,
        "winner": winner.candidate.to_dict() if winner else None,
        "winner_probe_kind": winner.measurement.probe_kind if winner else None,
        "tokens_per_s": winner.measurement.tokens_per_s if winner else None,
        "created": study.created,
    }


def trial_row(probe: ProbeRecord, winner_trial: int | None) -> dict[str, Any]:
    """A trial as JSON has it."""
    measurement = probe.measurement
    known = {
        "trial": probe.trial,
        "key": probe.key,
        "candidate": probe.candidate.to_dict(),
        "outcome": measurement.outcome.value,
        "phase": measurement.phase.value if measurement.phase else None,
        **{name: measurement.detail.get(name) for name in (STRAGGLER, SLOW_MACHINE, PARITY)},
        "inferred": probe.inferred,
        "reused": probe.reused,
        "confirmation": probe.confirmation,
        "winner": probe.trial == winner_trial,
        "created": probe.created,
    }
    return {name: known[name] if name in known else getattr(measurement, name) for name in TRIAL_COLUMNS}


def trial_cells(probe: ProbeRecord, winner_trial: int | None, names: Collection[str] = ()) -> list[str]:
    """A trial as the table has it; `names` are the knobs to show beside the core ones."""
    measurement = probe.measurement
    phase = f" in {measurement.phase.value}" if measurement.phase and measurement.outcome is not Outcome.OK else ""
    notes = [word for word in ("inferred", "reused") if getattr(probe, word)]
    if probe.confirmation:
        notes.append(COMPARISON if COMPARISON in measurement.detail else "confirmation")
    notes += ["at risk"] if measurement.at_risk else []
    notes += ["set aside"] if set_aside(measurement) else []
    notes += [f"rank {slow['rank']} slow"] if (slow := measurement.detail.get(STRAGGLER)) else []
    notes += ["slow machine"] if SLOW_MACHINE in measurement.detail else []
    notes += ["predicted"] if measurement.predicted else []
    notes += ["winner"] if probe.trial == winner_trial else []
    return [
        str(probe.trial),
        probe.candidate.label(names),
        measurement.outcome.value + phase,
        tokens(measurement.tokens_per_s),
        spread(measurement.tokens_per_s_low, measurement.tokens_per_s_high),
        seconds(measurement.step_s),
        memory(measurement),
        gib(measurement.host_peak_bytes),
        measurement.probe_kind,
        f"{measurement.wall_s:,.1f} s" if measurement.wall_s else NOTHING,
        ", ".join(notes),
    ]


def _study_cells(row: dict[str, Any]) -> list[str]:
    winner = str(Candidate.from_dict(row["winner"])) if row["winner"] else NOTHING
    devices = f"{row['nodes']} × {row['devices_per_node']}"
    counts = [str(row[name]) for name in ("trials", "ok", "oom", "other")]
    winner = marked(winner, row["winner_probe_kind"])
    return [row["study"], row["model"], row["machine"], devices, *counts, tokens(row["tokens_per_s"]), winner]
