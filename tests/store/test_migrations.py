"""The schema: made once, recorded in a table of ours, and never touched when it is newer than we are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.storages import RDBStorage
from sqlalchemy import Connection, NullPool, create_engine, inspect, text

from autotune.errors import StoreError
from autotune.machine.machine import Machine
from autotune.store import migrations
from autotune.store.engine import make_folder, open_engine, parse_url
from autotune.store.store import Store
from autotune.store.tables import metadata
from autotune.workload.workload import Workload
from tests.commands import wait_for
from tests.postgres import Server

Open = Callable[..., Store]


def test_the_migrations_make_the_tables_that_the_code_expects(url: str, opened: Open) -> None:
    opened(url)
    engine = open_engine(parse_url(url))
    found = inspect(engine)
    for table in metadata.sorted_tables:
        columns = {column["name"]: column for column in found.get_columns(table.name)}
        assert list(columns) == [column.name for column in table.columns]
        for column in table.columns:
            assert columns[column.name]["type"].python_type is column.type.python_type, column
            assert columns[column.name]["nullable"] == column.nullable, column
        assert found.get_pk_constraint(table.name)["constrained_columns"] == list(table.primary_key.columns.keys())
        assert {index["name"] for index in found.get_indexes(table.name)} == {index.name for index in table.indexes}
    engine.dispose()


def test_every_table_of_ours_is_prefixed_and_alembic_is_left_to_optuna(url: str, opened: Open) -> None:
    opened(url)
    engine = open_engine(parse_url(url))
    tables = inspect(engine).get_table_names()
    engine.dispose()
    assert tables
    assert all(name.startswith("autotune_") for name in tables)


def test_opening_again_migrates_nothing(url: str, opened: Open) -> None:
    opened(url)
    opened(url)
    engine = open_engine(parse_url(url))
    with engine.connect() as connection:
        applied = connection.execute(text("SELECT version, name FROM autotune_schema ORDER BY version")).all()
        assert applied == [(1, "first_tables"), (2, "workers_and_claims")]
        assert migrations.pending(connection) == 0
    engine.dispose()


def test_a_database_of_a_newer_version_is_refused_with_a_hint(url: str, opened: Open) -> None:
    opened(url)
    engine = open_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO autotune_schema VALUES (99, 'from the future', '2030')"))
    engine.dispose()
    with pytest.raises(StoreError, match="newer autotune") as caught:
        Store.open(url)
    assert "upgrade autotune" in caught.value.hint
    with pytest.raises(StoreError, match="newer autotune"):
        Store.open(url, create=False)


def test_a_migration_that_fails_leaves_nothing_behind(
    url: str, opened: Open, monkeypatch: pytest.MonkeyPatch, workload: Workload, machine: Machine
) -> None:
    opened(url).open_study("s", workload, machine)

    def half(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE autotune_half (a INTEGER)"))
        connection.execute(text("CREATE TABLE autotune_half (a INTEGER)"))

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, half))
        with pytest.raises(StoreError):
            Store.open(url)
    store = opened(url)
    assert [study.name for study in store.studies()] == ["s"]
    engine = open_engine(parse_url(url))
    assert "autotune_half" not in inspect(engine).get_table_names()
    engine.dispose()


def test_a_reader_does_not_change_a_database_that_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE recipes (a INTEGER)"))
    engine.dispose()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="holds no studies of autotune"):
        Store.open(f"sqlite:///{path}", create=False)
    assert path.read_bytes() == before


def test_a_database_of_another_program_that_migrates_with_alembic_is_left_alone(url: str, opened: Open) -> None:
    parsed = parse_url(url)
    make_folder(parsed)
    engine = open_engine(parsed)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
    with pytest.raises(StoreError, match="holds the tables of another program"):
        Store.open(url)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()


def test_a_database_of_optunas_is_welcome(url: str, opened: Open) -> None:
    parsed = parse_url(url)
    make_folder(parsed)
    storage = RDBStorage(parsed.render_as_string(hide_password=False))
    storage.remove_session()
    storage.engine.dispose()
    opened(url).optuna_storage()


def test_optuna_tables_of_another_version_are_refused_with_a_hint(url: str, opened: Open) -> None:
    make_optunas_tables_old(url, opened)
    with pytest.raises(StoreError, match="another version of Optuna") as caught:
        opened(url).optuna_storage()
    assert "optuna storage upgrade" in caught.value.hint


def test_an_optuna_that_does_not_open_leaves_no_connection(postgres: Server, opened: Open) -> None:
    url = postgres.database()
    make_optunas_tables_old(url, opened)
    store = opened(url)
    with pytest.raises(StoreError) as kept:  # and with it whatever was alive when it was raised
        store.optuna_storage()
    store.close()
    assert "Optuna" in str(kept.value)
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as connection:
        wait_for(lambda: connection.scalar(text(others)) == 0, 5)


def make_optunas_tables_old(url: str, opened: Open) -> None:
    store = opened(url)
    store.optuna_storage()
    with store.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'v0.9.0.a'"))
    store.close()
