"""What a database can do to us, each as a StoreError of one sentence and a hint, and never with a password."""

from __future__ import annotations

from types import TracebackType

from sqlalchemy import URL
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    PendingRollbackError,
    SQLAlchemyError,
)

from autotune import credentials
from autotune.errors import AutotuneError, StoreError
from autotune.store.engine import shown

_SQLITE = (
    ("SQLITE_NOTADB", "{url} is not a SQLite database", "name another file with study.store=sqlite:///…"),
    ("SQLITE_CORRUPT", "{url} is damaged", "restore it from a copy, or name another file with study.store=sqlite:///…"),
    (
        "SQLITE_READONLY",
        "{url} cannot be written: the file or its folder is read-only",
        "make it writable, or name another place with output=… or study.store=sqlite:///…",
    ),
    (
        "SQLITE_CANTOPEN",
        "{url} cannot be opened: its folder is missing or may not be used",
        "check the path and its permissions, or name another place with output=… or study.store=sqlite:///…",
    ),
    (
        "SQLITE_FULL",
        "the disk that holds {url} is full",
        "everything stored so far is kept; make room and run the same command again",
    ),
    (
        "SQLITE_BUSY",
        "{url} is locked by another program",
        "see who has it open (another tuner, a database browser, a dashboard), close it and run the same command again",
    ),
    (
        "SQLITE_IOERR",
        "{url} cannot be read or written: the disk reports an error",
        "everything stored so far is kept; check the disk and run the same command again",
    ),
)

_POSTGRES = {
    "28P01": "check the user and the password in the URL",
    "28000": "check the user and the server's pg_hba.conf",
    "3D000": "create the database, or name another in the URL",
    "42501": "the user needs the right to create tables and to write",
    "53100": "the server's disk is full; everything stored so far is kept, make room and run the same command again",
    "53300": "the server has no connection left; end some, or raise max_connections",
}


_PASSING = ("57P01", "57P02", "57P03", "53300", "40001", "40P01")
"""A server that goes down or comes up, has no connection left for now, or chose this transaction to end a deadlock."""


class ConnectionLost(StoreError):
    """The server did not answer, or stopped to: nobody knows whether what was asked was done. It may be asked again."""


class store_faults:
    """Turns what the database raises inside the block into StoreErrors.

    Optuna wraps the database's errors, and in some of its own error paths stumbles over them (an UnboundLocalError in
    `optimize` when `tell` fails), so the whole chain of causes and contexts is looked through.
    """

    def __init__(self, url: URL) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, AutotuneError):
            found = store_error(self._url, error)
            if found is not None:
                raise found from error


def store_error(url: URL, error: Exception) -> StoreError | None:
    """The StoreError that tells of `error`, None where no database is behind it."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        link = queue.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, StoreError):
            return link
        if isinstance(link, SQLAlchemyError):
            return _of_database(url, link)
        queue += [link.__cause__, link.__context__]
    return None


def missing_driver(error: ImportError) -> StoreError:
    """The StoreError for a driver that is not installed."""
    return StoreError(
        f"the database's driver is not installed ({error.name or error})",
        "pip install 'autotune[postgres]' brings psycopg for PostgreSQL",
    )


def missing_folder(url: URL, error: OSError) -> StoreError:
    """The StoreError for a folder that cannot be made."""
    return StoreError(
        f"the folder of {shown(url)} cannot be made: {error.strerror or error}",
        "name another place with output=… or study.store=sqlite:///…",
    )


def _of_database(url: URL, error: SQLAlchemyError) -> StoreError:
    if isinstance(error, NoSuchModuleError):
        return StoreError(
            f"no driver is known for a store in {url.drivername}",
            "write sqlite:///file or postgresql://user@host/database",
        )
    original = error.orig if isinstance(error, DBAPIError) else None
    code = getattr(original, "sqlite_errorname", None)
    for prefix, sentence, hint in _SQLITE:
        if code is not None and (code.startswith(prefix) or (prefix == "SQLITE_BUSY" and code == "SQLITE_LOCKED")):
            return StoreError(sentence.format(url=shown(url)), hint)
    lines = [line.strip() for line in str(original or error).splitlines() if line.strip()]
    text = credentials.masked(lines[0] if lines else type(error).__name__)
    hint = _POSTGRES.get(
        getattr(original, "sqlstate", None) or "",
        "see that the server runs and can be reached, and that user, password and database in the URL are right "
        "(a password with special characters is percent-encoded); what is stored is kept",
    )
    kind = ConnectionLost if url.get_backend_name() == "postgresql" and _is_passing(error) else StoreError
    return kind(f"the store {shown(url)} failed: {text}", hint)


def _is_passing(error: SQLAlchemyError) -> bool:
    if not isinstance(error, DBAPIError):
        return isinstance(error, PendingRollbackError)
    state = getattr(error.orig, "sqlstate", None)
    if state is None:  # libpq's own words: it never came to the server, or lost it
        return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
    return state in _PASSING or state.startswith("08")
