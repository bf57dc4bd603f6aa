"""The database of a store: how it is opened, read and written, and waited for where its server goes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from sqlalchemy import URL, Connection, Engine, func, inspect, select

from autotune.errors import StoreError
from autotune.store.engine import make_folder, open_engine, parse_url, shown, writing
from autotune.store.faults import missing_driver, missing_folder, store_faults
from autotune.store.migrations import migrate, pending, version
from autotune.store.patience import Answer, Patience
from autotune.store.tables import schema, studies

MAKING = 0x73747564  # any constant but that of the migrations: workers that make a study together take turns


class Database:
    """An open database.

    Attributes:
        patience: how long a connection that is lost is waited for.
    """

    def __init__(self, url: URL, engine: Engine) -> None:
        self._url, self._engine = url, engine
        self.patience = Patience()

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Self:
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
                    _refuse_strangers(engine, parsed)
                    migrate(engine)
                else:
                    _check_readable(engine, parsed)
                unless_opened.pop_all()
        return cls(parsed, engine)

    @property
    def is_file(self) -> bool:
        """Whether the database is a SQLite file, on which one command works at a time."""
        return self._url.get_backend_name() == "sqlite"

    @property
    def url(self) -> str:
        """The database's URL as people and logs may see it."""
        return shown(self._url)

    def faults(self) -> store_faults:
        """A context that turns the database's errors, also those that Optuna wraps, into StoreErrors."""
        return store_faults(self._url)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read from."""
        with self.faults(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction, committed at the end."""
        with self.faults(), writing(self._engine) as connection:
            yield connection

    def lock_study(self, connection: Connection, study: str) -> None:
        """Let no other transaction that locks the study begin before this one has ended."""
        row = connection.execute(select(studies.c.name).where(studies.c.name == study).with_for_update()).first()
        if row is None and not self.is_file:  # there is no row to lock yet, and two workers may be about to make it
            connection.execute(select(func.pg_advisory_xact_lock(MAKING)))
            connection.execute(select(studies.c.name).where(studies.c.name == study).with_for_update())

    def retry(self, ask: Callable[[], Answer]) -> Answer:
        """What Optuna answers, asked again while the connection is lost; it must be the same when asked twice."""

        def asked() -> Answer:
            with self.faults():
                return ask()

        return self.patience.run(asked)


def _refuse_strangers(engine: Engine, url: URL) -> None:
    """Leave a database alone whose alembic version is another program's: Optuna could not keep its own beside it."""
    names = set(inspect(engine).get_table_names())
    if "alembic_version" in names and not names & {schema.name, "version_info"}:
        raise StoreError(
            f"{shown(url)} holds the tables of another program", "name another database with study.store=…"
        )


def _check_readable(engine: Engine, url: URL) -> None:
    with engine.connect() as connection:
        if version(connection) == 0:
            raise StoreError(f"{shown(url)} holds no studies of autotune", "name the store with --store URL")
        if pending(connection):
            raise StoreError(f"{shown(url)} was written by an older autotune", "any sweep in it brings it up to date")
