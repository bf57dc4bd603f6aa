"""What tests of several folders need: a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import Server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
