"""The store: studies and probes in SQL, one committed transaction per probe, in the database that Optuna uses too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, func, insert, select, update

from autotune.candidate import Candidate
from autotune.errors import SettingsError, StoreError
from autotune.machine.machine import Machine
from autotune.probe.measurement import REUSABLE, Measurement
from autotune.store.engine import connect_args, make_folder, open_engine, parse_url, patiently, shown, writing
from autotune.store.faults import missing_driver, missing_folder, store_faults
from autotune.store.migrations import migrate, pending, version
from autotune.store.owner import LEASE_S, NOBODY, Owner
from autotune.store.records import ProbeRecord, StudyRecord, measurement_of, measurement_row, probe_record, study_record
from autotune.store.tables import probes, studies
from autotune.workload.workload import Workload

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

_LONGEST_NAME = 255


class Store:
    """An open database of studies. Every method is its own transaction and raises StoreError when that fails."""

    def __init__(self, url: URL, engine: Engine) -> None:
        self._url = url
        self._engine = engine
        self._optuna: RDBStorage | None = None

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Store:
        """Open a database, bringing its tables to the newest version.

        Args:
            url: SQLAlchemy URL of a SQLite file or a PostgreSQL database.
            create: make what is missing; False for those who only read, so that a misspelt path makes no file.

        Raises:
            StoreError: the URL, the driver, the file, the folder or the server is not usable, or the database was
                written by a newer version.
        """
        parsed = parse_url(url)
        try:
            if create:
                make_folder(parsed)
            elif parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
                raise StoreError(f"there is no store at {shown(parsed)}", "name it with --store URL or AUTOTUNE_STORE")
        except OSError as error:
            raise missing_folder(parsed, error) from error
        with store_faults(parsed):
            try:
                engine = open_engine(parsed)
            except ImportError as error:
                raise missing_driver(error) from error
            with ExitStack() as unless_opened:
                unless_opened.callback(engine.dispose)
                if create:
                    migrate(engine)
                else:
                    _check_readable(engine, parsed)
                unless_opened.pop_all()
        return cls(parsed, engine)

    def close(self) -> None:
        """Close every connection, Optuna's too."""
        if self._optuna is not None:
            self._optuna.remove_session()
            self._optuna.engine.dispose()
            self._optuna = None
        self._engine.dispose()

    @property
    def url(self) -> str:
        """The database's URL as people and logs may see it."""
        return shown(self._url)

    def faults(self) -> store_faults:
        """A context that turns the database's errors, also those that Optuna wraps, into StoreErrors."""
        return store_faults(self._url)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self.faults(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self.faults(), writing(self._engine) as connection:
            yield connection

    # studies

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
        with self._writing() as connection:
            row = _study_row(connection, name, for_update=True)
            if row is None:
                connection.execute(insert(studies).values(name=name, created=_now(), **here))
            elif _is_empty(connection, row):
                connection.execute(update(studies).where(studies.c.name == name).values(here))
            else:
                _refuse_another(study_record(row), workload, machine)
                connection.execute(update(studies).where(studies.c.name == name).values(machine=here["machine"]))
            made = _study_row(connection, name)
            assert made is not None
            return study_record(made)

    def study(self, name: str) -> StudyRecord:
        """The study of that name.

        Raises:
            SettingsError: there is none; the hint names those that there are.
        """
        with self._reading() as connection:
            row = _study_row(connection, name)
            known = [] if row else connection.execute(select(studies.c.name).order_by(studies.c.name)).scalars().all()
        if row is None:
            hint = f"there are: {', '.join(known)}" if known else "the store holds no study yet"
            raise SettingsError(f"there is no study {name} in {self.url}", hint)
        return study_record(row)

    def studies(self) -> list[StudyRecord]:
        """Every study, in the order of their making."""
        with self._reading() as connection:
            rows = connection.execute(select(studies).order_by(studies.c.created, studies.c.name)).mappings().all()
        return [study_record(dict(row)) for row in rows]

    def set_baseline(self, study: str, key: str) -> None:
        """Say which candidate is the untuned default."""
        with self._writing() as connection:
            connection.execute(update(studies).where(studies.c.name == study).values(baseline_key=key))

    def set_winner(self, study: str, trial: int | None) -> None:
        """Say which probe is the winner's."""
        with self._writing() as connection:
            connection.execute(update(studies).where(studies.c.name == study).values(winner_trial=trial))

    # probes

    def probes(self, study: str) -> list[ProbeRecord]:
        """Every probe of a study, in order."""
        with self._reading() as connection:
            rows = connection.execute(select(probes).where(probes.c.study == study).order_by(probes.c.trial))
            return [probe_record(dict(row)) for row in rows.mappings()]

    def add_probe(
        self,
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
    ) -> ProbeRecord:
        """Keep one measurement: a transaction of its own, on disk when this returns."""
        row = {
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
            "created": _now(),
        }
        with self._writing() as connection:
            _study_row(connection, study, for_update=True)  # the next number is nobody else's
            last = connection.execute(select(func.max(probes.c.trial)).where(probes.c.study == study)).scalar()
            row["trial"] = (last or 0) + 1
            connection.execute(insert(probes).values(row))
        return probe_record(row)

    def reusable(self, reuse_key: str) -> Measurement | None:
        """The newest measurement, of any study, that was really made under these conditions and may be taken over."""
        query = (
            select(probes)
            .where(probes.c.reuse_key == reuse_key, probes.c.outcome.in_(sorted(REUSABLE)))
            .where(~probes.c.inferred, ~probes.c.reused)
            .order_by(probes.c.created.desc(), probes.c.trial.desc())
            .limit(1)
        )
        with self._reading() as connection:
            row = connection.execute(query).mappings().first()
        return measurement_of(dict(row)) if row else None

    # owner

    def claim_owner(self, study: str, lease_s: float = LEASE_S) -> None:
        """Make this process the one that tunes the study, or renew that it is; a dead owner is taken over.

        A study that is not made yet has nobody to refuse anyone, and nobody to remember.

        Raises:
            StoreError: another process tunes it.
        """
        mine = Owner.here(lease_s)
        with self._writing() as connection:
            row = _study_row(connection, study, for_update=True)
            owner = Owner.of(row) if row else None
            if owner is not None and not owner.same_process(mine) and owner.is_alive():
                raise StoreError(
                    f"study {study} is being tuned by process {owner.pid} on {owner.host}", _when_free(owner, mine)
                )
            connection.execute(update(studies).where(studies.c.name == study).values(mine.row()))

    def release_owner(self, study: str) -> None:
        """Leave the study to others; nothing happens where this process is not its owner."""
        with self._writing() as connection:
            row = _study_row(connection, study, for_update=True)
            owner = Owner.of(row) if row else None
            if owner is not None and owner.same_process(Owner.here(0)):
                connection.execute(update(studies).where(studies.c.name == study).values(NOBODY))

    # Optuna

    def optuna_storage(self) -> RDBStorage:
        """Optuna's storage in the same database, the same object at every call.

        Raises:
            StoreError: the database fails, or its Optuna tables are of another version.
        """
        if self._optuna is None:
            from optuna.storages import RDBStorage

            # Optuna formats the URL as a template, so braces (in a password) are doubled.
            url = self._url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
            arguments = {"connect_args": connect_args(self._url)}
            with self.faults():
                try:
                    self._optuna = patiently(lambda: RDBStorage(url, engine_kwargs=arguments))
                except RuntimeError as error:
                    raise StoreError(
                        f"the Optuna tables in {self.url} are of another version of Optuna",
                        "run `optuna storage upgrade --storage URL`, or name another store with study.store=…",
                    ) from error
        return self._optuna


def _study_row(connection: Connection, name: str, *, for_update: bool = False) -> dict[str, Any] | None:
    query = select(studies).where(studies.c.name == name)
    row = connection.execute(query.with_for_update() if for_update else query).mappings().first()
    return dict(row) if row else None


def _is_empty(connection: Connection, row: Mapping[str, Any]) -> bool:
    owner = Owner.of(row)
    if owner is not None and owner.is_alive() and not owner.same_process(Owner.here(0)):
        return False
    return connection.execute(select(probes.c.trial).where(probes.c.study == row["name"]).limit(1)).first() is None


def _check_readable(engine: Engine, url: URL) -> None:
    with engine.connect() as connection:
        if version(connection) == 0:
            raise StoreError(f"{shown(url)} holds no studies of autotune", "name the store with --store URL")
        if pending(connection):
            raise StoreError(f"{shown(url)} was written by an older autotune", "any sweep in it brings it up to date")


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


def _when_free(owner: Owner, mine: Owner) -> str:
    hint = "wait for it, end it, or start another study with study.name=…"
    if owner.host != mine.host:
        minutes = max(1, round((owner.until - time.time()) / 60))
        hint += f"; if that process is gone, the study is free in {minutes} min"
    return hint


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
