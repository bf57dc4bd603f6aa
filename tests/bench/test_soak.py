"""Thirty probes in a row leave nothing behind in the processes that stay."""

from __future__ import annotations

import pytest

from tests.bench.soak import MOST, SETTLED, growth, soak

pytestmark = pytest.mark.probes


def test_thirty_warm_probes_leave_no_memory_no_zombies_and_no_files() -> None:
    looks = soak(30)
    for name in looks[0].memory:
        assert growth(looks, name) < MOST, name
        assert looks[-1].files[name] <= looks[SETTLED].files[name], name
    assert {look.zombies for look in looks} == {0}
