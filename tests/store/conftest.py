"""Stores to be tested: SQLite always, PostgreSQL where AUTOTUNE_TEST_POSTGRES names an empty database."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from autotune.machine.machine import Machine
from autotune.settings import normalise_store
from autotune.store.store import Store
from autotune.workload.workload import Model, Workload

SERVER = os.environ.get("AUTOTUNE_TEST_POSTGRES")


@pytest.fixture(params=["sqlite", "postgresql"] if SERVER else ["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'studies' / 'autotune.db'}"
    assert SERVER is not None
    engine = create_engine(normalise_store(SERVER))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return SERVER


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'autotune.db'}"


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Opens stores and closes them afterwards."""
    stores: list[Store] = []

    def open_store(url: str, **more: bool) -> Store:
        stores.append(Store.open(url, **more))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture
def workload() -> Workload:
    return Workload(Model("gpt_tiny", type="gpt2", config={"n_layer": 2}), seq_len=128, global_batch=32)


@pytest.fixture
def machine() -> Machine:
    return Machine("cpu", accelerator="cpu", devices_per_node=2, device_memory_gib=1.0)
