"""What the store hands out: studies and probes as plain records, and their way into rows and back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement
from autotune.store.tables import MEASUREMENT_COLUMNS
from autotune.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """One workload on one machine.

    Attributes:
        created: ISO 8601, UTC.
        winner_trial: the probe that is the winner's confirmation, once there is one.
        baseline_key: the key of the untuned default.
    """

    name: str
    workload: Workload
    machine: Machine
    created: str
    winner_trial: int | None = None
    baseline_key: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """One measurement of one candidate in a study.

    Attributes:
        trial: its number in our study, from 1 up.
        key: of the candidate.
        inferred: no process was started: an OOM of a smaller micro-batch says that this one is an OOM too.
        reused: taken over from another study that measured the same under the same conditions.
        confirmation: the longer measurement of a finalist.
        optuna_study, optuna_number: the Optuna trial that asked for it, where one did.
        created: ISO 8601, UTC.
        reuse_key: equal exactly where a measurement could stand for another (see reuse.py).
        worker: who measured it, as `host:pid`.
    """

    study: str
    trial: int
    key: str
    candidate: Candidate
    measurement: Measurement
    inferred: bool
    reused: bool
    confirmation: bool
    optuna_study: str | None
    optuna_number: int | None
    created: str
    reuse_key: str | None = None
    worker: str | None = None


def study_record(row: Mapping[str, Any]) -> StudyRecord:
    """The study in a row of `autotune_studies`."""
    return StudyRecord(
        name=row["name"],
        workload=Workload.from_dict(json.loads(row["workload"])),
        machine=Machine.from_dict(json.loads(row["machine"])),
        created=row["created"],
        winner_trial=row["winner_trial"],
        baseline_key=row["baseline_key"],
    )


def winner_of(study: StudyRecord, probes: Iterable[ProbeRecord]) -> ProbeRecord | None:
    """The probe that won the study, where there is one."""
    return next((probe for probe in probes if probe.trial == study.winner_trial), None)


def measurement_row(measurement: Measurement) -> dict[str, Any]:
    """The columns that hold a measurement."""
    values = measurement.to_dict()
    columns = {name: values.pop(name) for name in MEASUREMENT_COLUMNS}
    columns["outcome"] = measurement.outcome.value  # drivers write an enum by its name
    columns["phase"] = measurement.phase.value if measurement.phase else None
    return {**columns, "rest": json.dumps(values)}


def probe_row(
    study: str,
    candidate: Candidate,
    measurement: Measurement,
    *,
    inferred: bool = False,
    reused: bool = False,
    confirmation: bool = False,
    reuse_key: str | None = None,
    optuna_study: str | None = None,
    optuna_number: int | None = None,
    worker: str | None = None,
) -> dict[str, Any]:
    """The columns that hold a probe which has no number yet. Its `uid` is its own wherever it is kept meanwhile."""
    return {
        "study": study,
        "key": candidate.key,
        "candidate": json.dumps(candidate.to_dict()),
        **measurement_row(measurement),
        "inferred": inferred,
        "reused": reused,
        "confirmation": confirmation,
        "reuse_key": reuse_key,
        "optuna_study": optuna_study,
        "optuna_number": optuna_number,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "uid": uuid.uuid4().hex,
        "worker": worker,
    }


def measurement_of(row: Mapping[str, Any]) -> Measurement:
    """The measurement in a row of `autotune_probes`."""
    return Measurement.from_dict({**json.loads(row["rest"]), **{name: row[name] for name in MEASUREMENT_COLUMNS}})


def probe_record(row: Mapping[str, Any]) -> ProbeRecord:
    """The probe in a row of `autotune_probes`."""
    return ProbeRecord(
        study=row["study"],
        trial=row["trial"],
        key=row["key"],
        candidate=Candidate.from_dict(json.loads(row["candidate"])),
        measurement=measurement_of(row),
        inferred=row["inferred"],
        reused=row["reused"],
        confirmation=row["confirmation"],
        optuna_study=row["optuna_study"],
        optuna_number=row["optuna_number"],
        created=row["created"],
        reuse_key=row["reuse_key"],
        worker=row["worker"],
    )
