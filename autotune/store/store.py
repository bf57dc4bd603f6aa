"""The store: studies and probes in SQL, one committed transaction per probe, in the database that Optuna uses too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, create_engine, func, insert, select, update

from autotune.candidate import Candidate
from autotune.errors import SettingsError, StoreError
from autotune.machine.machine import Machine
from autotune.probe.measurement import REUSABLE, Measurement
from autotune.store.claims import Claim, ClaimLost, give_back, held
from autotune.store.crew import Crew
from autotune.store.database import Database
from autotune.store.engine import connect_args, patiently
from autotune.store.patience import patient
from autotune.store.records import (
    ProbeRecord,
    StudyRecord,
    measurement_of,
    measurement_row,
    probe_record,
    probe_row,
    study_record,
)
from autotune.store.tables import claims, probes, studies, workers
from autotune.store.worker import Worker
from autotune.workload.workload import Workload

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

_LONGEST_NAME = 255
HEARTBEAT_S = 5.0


class Store(Database):
    """An open database of studies. Every method is its own transaction and raises StoreError when that fails.

    A connection that is lost is made again, and what was asked is asked again, as long as `patience` lasts.
    """

    def __init__(self, url: URL, engine: Engine) -> None:
        super().__init__(url, engine)
        self._optuna: RDBStorage | None = None
        self._crews: dict[str, Crew] = {}

    def close(self) -> None:
        """Leave every study and close every connection, Optuna's too."""
        for crew in self._crews.values():
            crew.leave()
        if self._optuna is not None:
            self._optuna.remove_session()
            self._optuna.engine.dispose()
            self._optuna = None
        self._engine.dispose()

    # studies

    @patient
    def open_study(self, name: str, workload: Workload, machine: Machine) -> StudyRecord:
        """The study of that name, made where there is none; its machine's headroom is brought up to date.

        A study without probes, which nobody tunes, has nothing that could be mixed: it takes what it is given.

        Raises:
            SettingsError: the study holds another workload or machine, or the name cannot be one.
        """
        if not name or len(name) > _LONGEST_NAME:
            raise SettingsError(
                f"a study's name has 1 to {_LONGEST_NAME} characters, this one {len(name)}", "choose another study.name"
            )
        here = {
            "workload": json.dumps(workload.to_dict()),
            "workload_digest": workload.digest,
            "machine": json.dumps(machine.to_dict()),
            "machine_fingerprint": machine.fingerprint,
        }
        with self.writing() as connection:
            self.lock_study(connection, name)
            row = _study_row(connection, name)
            if row is None:
                connection.execute(
                    insert(studies).values(
                        name=name, created=datetime.now(UTC).isoformat(timespec="milliseconds"), **here
                    )
                )
            elif _is_empty(connection, name):
                connection.execute(update(studies).where(studies.c.name == name).values(here))
            else:
                _refuse_another(study_record(row), workload, machine)
                connection.execute(update(studies).where(studies.c.name == name).values(machine=here["machine"]))
            made = _study_row(connection, name)
            assert made is not None
            return study_record(made)

    @patient
    def study(self, name: str) -> StudyRecord:
        """The study of that name.

        Raises:
            SettingsError: there is none; the hint names those that there are.
        """
        with self.reading() as connection:
            row = _study_row(connection, name)
            known = [] if row else connection.execute(select(studies.c.name).order_by(studies.c.name)).scalars().all()
        if row is None:
            hint = f"there are: {', '.join(known)}" if known else "the store holds no study yet"
            raise SettingsError(f"there is no study {name} in {self.url}", hint)
        return study_record(row)

    @patient
    def studies(self) -> list[StudyRecord]:
        """Every study, in the order of their making."""
        with self.reading() as connection:
            rows = connection.execute(select(studies).order_by(studies.c.created, studies.c.name)).mappings().all()
        return [study_record(dict(row)) for row in rows]

    @patient
    def set_baseline(self, study: str, key: str) -> None:
        """Say which candidate is the untuned default."""
        with self.writing() as connection:
            connection.execute(update(studies).where(studies.c.name == study).values(baseline_key=key))

    @patient
    def set_winner(self, study: str, trial: int | None) -> None:
        """Say which probe is the winner's."""
        with self.writing() as connection:
            connection.execute(update(studies).where(studies.c.name == study).values(winner_trial=trial))

    # probes

    @patient
    def probes(self, study: str, after: int = 0) -> list[ProbeRecord]:
        """The probes of a study in order, those after a number or all."""
        query = select(probes).where(probes.c.study == study, probes.c.trial > after).order_by(probes.c.trial)
        with self.reading() as connection:
            return [probe_record(dict(row)) for row in connection.execute(query).mappings()]

    def add_probe(self, study: str, candidate: Candidate, measurement: Measurement, **marks: Any) -> ProbeRecord:
        """Keep one measurement: a transaction of its own, on disk when this returns. For `marks` see probe_row."""
        return self.add_row(probe_row(study, candidate, measurement, **marks))

    @patient
    def add_row(self, row: dict[str, Any], claim: Claim | None = None, *, release: bool = True) -> ProbeRecord:
        """Keep the row of a probe, once: where its `uid` is known already, that is the answer.

        Args:
            row: of probe_row.
            claim: under which it was measured.
            release: give the claim back in the same transaction.

        Raises:
            ClaimLost: the claim has gone to another worker; nothing is kept.
        """
        with self.writing() as connection:
            study: str = row["study"]
            self.lock_study(connection, study)  # the next number is nobody else's
            known = connection.execute(select(probes).where(probes.c.uid == row["uid"])).mappings().first()
            if known is not None:
                return probe_record(dict(known))
            if claim is not None and not (give_back if release else held)(connection, claim):
                raise ClaimLost(claim.key)
            last = connection.execute(select(func.max(probes.c.trial)).where(probes.c.study == study)).scalar()
            numbered = {**row, "trial": (last or 0) + 1}
            connection.execute(insert(probes).values(numbered))
        return probe_record(numbered)

    @patient
    def is_superseded(self, row: Mapping[str, Any], claim: Claim) -> bool:
        """Whether what was measured under a lost claim has been measured again meanwhile, or is about to be."""
        again = (probes.c.study == claim.study) & (probes.c.key == row["key"]) & (probes.c.created > row["created"])
        taken = (claims.c.study == claim.study) & (claims.c.what == claim.what) & (claims.c.key == claim.key)
        queries = select(probes.c.trial).where(again).limit(1), select(claims.c.worker).where(taken)
        with self.reading() as connection:
            return any(connection.execute(query).first() is not None for query in queries)

    @patient
    def amend(self, record: ProbeRecord, detail: Mapping[str, Any]) -> ProbeRecord:
        """Add to the detail of a stored measurement what was found out about it later; nothing else of it changes."""
        measurement = record.measurement
        amended = replace(record, measurement=replace(measurement, detail={**measurement.detail, **detail}))
        if amended != record:
            rest = measurement_row(amended.measurement)["rest"]
            mine = (probes.c.study == record.study) & (probes.c.trial == record.trial)
            with self.writing() as connection:
                connection.execute(update(probes).where(mine).values(rest=rest))
        return amended

    @patient
    def reusable(self, reuse_key: str) -> Measurement | None:
        """The newest measurement, of any study, that was really made under these conditions and may be taken over."""
        query = (
            select(probes)
            .where(probes.c.reuse_key == reuse_key, probes.c.outcome.in_(sorted(REUSABLE)))
            .where(~probes.c.inferred, ~probes.c.reused)
            .order_by(probes.c.created.desc(), probes.c.trial.desc())
            .limit(1)
        )
        with self.reading() as connection:
            row = connection.execute(query).mappings().first()
        return measurement_of(dict(row)) if row else None

    # workers

    def crew(self, study: str, family: str | None = None, heartbeat_s: float = HEARTBEAT_S) -> Crew:
        """The study's workers as this process sees them, the same object at every call."""
        if study not in self._crews:
            self._crews[study] = Crew(self, study, family, heartbeat_s)
        return self._crews[study]

    # Optuna

    def optuna_storage(self) -> RDBStorage:
        """Optuna's storage in the same database, the same object at every call.

        Raises:
            StoreError: the database fails, or its Optuna tables are of another version.
        """
        if self._optuna is None:
            with self.faults():
                try:
                    self._optuna = patiently(self._new_optuna_storage)
                except RuntimeError as error:
                    raise StoreError(
                        f"the Optuna tables in {self.url} are of another version of Optuna",
                        "run `optuna storage upgrade --storage URL`, or name another store with study.store=…",
                    ) from error
        return self._optuna

    def _new_optuna_storage(self) -> RDBStorage:
        from optuna.storages import RDBStorage

        # Optuna formats the URL as a template, so braces (in a password) are doubled.
        url = self._url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
        # Where its constructor fails, nobody has its engine to close the connections of; so they are of a pool of ours.
        pool = create_engine(self._url, connect_args=connect_args(self._url), pool_pre_ping=not self.is_file).pool
        with ExitStack() as unless_made:
            unless_made.callback(pool.dispose)
            storage = RDBStorage(url, engine_kwargs={"pool": pool})
            unless_made.pop_all()
        return storage


def _study_row(connection: Connection, name: str) -> dict[str, Any] | None:
    row = connection.execute(select(studies).where(studies.c.name == name)).mappings().first()
    return dict(row) if row else None


def _is_empty(connection: Connection, study: str) -> bool:
    """Whether a study has no probes and no worker but this process."""
    others = (Worker.of(row) for row in connection.execute(select(workers).where(workers.c.study == study)).mappings())
    if any(other.is_seen() is not False and other.pid != os.getpid() for other in others):
        return False
    return connection.execute(select(probes.c.trial).where(probes.c.study == study).limit(1)).first() is None


def _refuse_another(known: StudyRecord, workload: Workload, machine: Machine) -> None:
    for word, theirs, mine, same in (
        ("workload", known.workload.to_dict(), workload.to_dict(), known.workload.digest == workload.digest),
        ("machine", known.machine.to_dict(), machine.to_dict(), known.machine.fingerprint == machine.fingerprint),
    ):
        if not same:
            differing = [line for line in _differences(word, theirs, mine) if not line.startswith("machine.headroom ")]
            raise SettingsError(
                f"study {known.name} holds another {word}: {', '.join(differing)}",
                "study.name=… starts a new study; its own settings go on with this one",
            )


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = list(old) + [name for name in new if name not in old]
        return [
            line for name in names for line in _differences(f"{path}.{name}", old.get(name, "–"), new.get(name, "–"))
        ]
    return [] if json.dumps(old) == json.dumps(new) else [f"{path} {_shown(old)} → {_shown(new)}"]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
