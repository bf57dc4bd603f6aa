"""The SQLAlchemy engine: which databases are taken, how they are opened, how a write begins.

SQLite keeps its rollback journal: write-ahead logging needs shared memory and breaks on the network file systems that
home directories of clusters live on, and with one writer and a row per probe it would gain nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Double, Engine, create_engine, event, literal_column, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError

from autotune import credentials
from autotune.errors import StoreError
from autotune.settings import normalise_store

LOCK_TIMEOUT_S = 30.0
"""How long a locked SQLite database is waited for; writes take milliseconds, a slow network file system a second."""

CONNECT_TIMEOUT_S = 10
"""How long a PostgreSQL server may take to answer; without it a filtered port hangs for minutes."""

_TRIES = 20

Made = TypeVar("Made")

_EXAMPLES = "sqlite:///studies/autotune.db or postgresql://user@host/database"


def parse_url(url: str) -> URL:
    """The URL of a database that we can use.

    Raises:
        StoreError: it is malformed, or names something else than a SQLite file or a PostgreSQL database.
    """
    credentials.remember(url)
    try:
        parsed = make_url(normalise_store(url))
        backend = parsed.get_backend_name()
    except (ArgumentError, ValueError) as error:  # a port that is no number is a ValueError
        raise StoreError("the store's URL cannot be read", f"write {_EXAMPLES}") from error
    if backend not in ("sqlite", "postgresql"):
        raise StoreError(f"a store in {backend} is not supported", f"write {_EXAMPLES}")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError("a store in memory would be gone with the program", f"name a file, e.g. {_EXAMPLES}")
    return parsed


def shown(url: URL) -> str:
    """The URL as people and logs may see it."""
    return credentials.masked(url.render_as_string(hide_password=True))


def connect_args(url: URL) -> dict[str, Any]:
    """The driver's arguments, for our engine and for Optuna's."""
    if url.get_backend_name() == "sqlite":
        return {"timeout": LOCK_TIMEOUT_S}
    return {"connect_timeout": CONNECT_TIMEOUT_S}


def make_folder(url: URL) -> None:
    """Make the folder that a SQLite file is to lie in.

    Raises:
        OSError: it cannot be made.
    """
    if url.get_backend_name() == "sqlite" and url.database is not None:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)


def open_engine(url: URL) -> Engine:
    """An engine whose transactions are what they say, on SQLite too.

    Python's SQLite driver starts transactions late and not at all before DDL; it is told to leave that to us.
    """
    engine = create_engine(url, connect_args=connect_args(url), pool_pre_ping=url.get_backend_name() != "sqlite")
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _begin)
    return engine


def _leave_transactions_to_us(connection: Any, record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys=ON")


def _begin(connection: Connection) -> None:
    # A reader that turns writer is refused at once instead of waiting, so a writer says so from the start.
    writes = connection.get_execution_options().get("autotune_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that writes: committed at the end, rolled back by any exception."""
    with engine.connect() as connection:
        connection = connection.execution_options(autotune_writes=True)
        with connection.begin():
            yield connection


def now(connection: Connection) -> ColumnElement[float]:
    """Seconds since the epoch by the database's clock: those of the hosts that ask it may differ."""
    sqlite = connection.dialect.name == "sqlite"
    moment = "(julianday('now') - 2440587.5) * 86400.0" if sqlite else "extract(epoch FROM clock_timestamp())::float8"
    return literal_column(moment, Double)


def patiently(make: Callable[[], Made]) -> Made:
    """What `make` makes, tried again where another process was making the same tables at that moment.

    Optuna looks whether its tables exist and then creates them, one by one and without a lock.
    """
    for _ in range(_TRIES):
        try:
            return make()
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
            time.sleep(random.uniform(0.02, 0.2))
    return make()
