"""Stores to be tested, each in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.machine.machine import Machine
from autotune.store.store import Store
from autotune.workload.workload import Model, Workload
from tests.postgres import Server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'studies' / 'autotune.db'}"
    server: Server = request.getfixturevalue("postgres")
    return server.database()


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
