"""Micro-migrations: ordered functions, each applied in one transaction together with its row in `autotune_schema`.

A migration is never edited once released: it says in plain DDL what it did to the databases of its day. The tables
as they are now are in `tables.py`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, func, insert, inspect, select, text

from autotune.errors import StoreError
from autotune.store.engine import writing
from autotune.store.tables import schema

_ADVISORY_LOCK = 0x6175746F  # any constant: workers that start together on an empty PostgreSQL database take turns


def _first_tables(connection: Connection) -> None:
    connection.execute(
        text(
            """
            CREATE TABLE autotune_studies (
                name VARCHAR(255) NOT NULL PRIMARY KEY,
                workload TEXT NOT NULL,
                workload_digest VARCHAR(16) NOT NULL,
                machine TEXT NOT NULL,
                machine_fingerprint VARCHAR(16) NOT NULL,
                created VARCHAR(40) NOT NULL,
                baseline_key VARCHAR(12),
                winner_trial INTEGER,
                owner_pid INTEGER,
                owner_started DOUBLE PRECISION,
                owner_host VARCHAR(255),
                owner_until DOUBLE PRECISION
            )
            """
        )
    )
    connection.execute(
        text(
            """
            CREATE TABLE autotune_probes (
                study VARCHAR(255) NOT NULL REFERENCES autotune_studies (name),
                trial INTEGER NOT NULL,
                key VARCHAR(12) NOT NULL,
                candidate TEXT NOT NULL,
                outcome VARCHAR(20) NOT NULL,
                phase VARCHAR(20),
                tokens_per_s DOUBLE PRECISION,
                tokens_per_s_low DOUBLE PRECISION,
                tokens_per_s_high DOUBLE PRECISION,
                step_s DOUBLE PRECISION,
                peak_allocated_bytes BIGINT,
                peak_reserved_bytes BIGINT,
                device_total_bytes BIGINT,
                host_peak_bytes BIGINT,
                probe_kind VARCHAR(20) NOT NULL,
                wall_s DOUBLE PRECISION NOT NULL,
                overhead_s DOUBLE PRECISION,
                inferred BOOLEAN NOT NULL,
                reused BOOLEAN NOT NULL,
                confirmation BOOLEAN NOT NULL,
                reuse_key VARCHAR(64),
                optuna_study VARCHAR(512),
                optuna_number INTEGER,
                created VARCHAR(40) NOT NULL,
                rest TEXT NOT NULL,
                PRIMARY KEY (study, trial)
            )
            """
        )
    )
    connection.execute(text("CREATE INDEX ix_autotune_probes_outcome ON autotune_probes (outcome)"))
    connection.execute(text("CREATE INDEX ix_autotune_probes_reuse_key ON autotune_probes (reuse_key)"))


def _workers_and_claims(connection: Connection) -> None:
    for column in ("owner_pid", "owner_started", "owner_host", "owner_until"):
        connection.execute(text(f"ALTER TABLE autotune_studies DROP COLUMN {column}"))
    connection.execute(text("ALTER TABLE autotune_probes ADD COLUMN uid VARCHAR(32)"))
    connection.execute(text("ALTER TABLE autotune_probes ADD COLUMN worker VARCHAR(300)"))
    connection.execute(text("CREATE UNIQUE INDEX ix_autotune_probes_uid ON autotune_probes (uid)"))
    connection.execute(
        text(
            """
            CREATE TABLE autotune_workers (
                id VARCHAR(32) NOT NULL PRIMARY KEY,
                study VARCHAR(255) NOT NULL,
                family VARCHAR(32) NOT NULL,
                host VARCHAR(255) NOT NULL,
                place VARCHAR(100) NOT NULL,
                pid INTEGER NOT NULL,
                process_started DOUBLE PRECISION NOT NULL,
                sweep VARCHAR(512),
                searching BOOLEAN NOT NULL,
                started DOUBLE PRECISION NOT NULL,
                heartbeat DOUBLE PRECISION NOT NULL
            )
            """
        )
    )
    connection.execute(text("CREATE INDEX ix_autotune_workers_study ON autotune_workers (study)"))
    connection.execute(
        text(
            """
            CREATE TABLE autotune_claims (
                study VARCHAR(255) NOT NULL,
                what VARCHAR(40) NOT NULL,
                key VARCHAR(64) NOT NULL,
                worker VARCHAR(32) NOT NULL,
                attempt INTEGER NOT NULL,
                sweep VARCHAR(512),
                claimed DOUBLE PRECISION NOT NULL,
                PRIMARY KEY (study, what, key)
            )
            """
        )
    )


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_first_tables, _workers_and_claims)


def version(connection: Connection) -> int:
    """How many migrations the database has seen; 0 for one that is not ours yet."""
    if not inspect(connection).has_table(schema.name):
        return 0
    return connection.execute(select(func.max(schema.c.version))).scalar() or 0


def pending(connection: Connection) -> int:
    """How many migrations are to be applied. Reads only.

    Raises:
        StoreError: the database was written by a newer version.
    """
    found, known = version(connection), len(MIGRATIONS)
    if found > known:
        raise StoreError(
            f"the store was written by a newer autotune (its schema is version {found}, this one knows {known})",
            "upgrade autotune, or name another store with study.store=…",
        )
    return known - found


def migrate(engine: Engine) -> None:
    """Bring the database to the newest schema.

    Raises:
        StoreError: the database was written by a newer version.
    """
    with engine.connect() as connection:
        if not pending(connection):
            return
    for number, migration in enumerate(MIGRATIONS, start=1):
        with writing(engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            if version(connection) >= number:
                continue
            schema.create(connection, checkfirst=True)
            migration(connection)
            connection.execute(
                insert(schema).values(
                    version=number, name=migration.__name__.strip("_"), applied=datetime.now(UTC).isoformat()
                )
            )
