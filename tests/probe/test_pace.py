"""One device that is slower than its peers is named, and a moment at which all are slow is known."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.pace import SLOWER, pace, slowness, straggler


def rounds(seconds: float, noise: float = 0.05, seed: int = 0, n: int = 19) -> list[float]:
    chance = random.Random(seed)
    return [seconds * (1 + chance.uniform(0, noise)) for _ in range(n)]


@given(st.integers(2, 16), st.data(), st.floats(1e-5, 10), st.integers(0, 1000))
def test_the_slow_one_is_named_whatever_the_unit(world: int, data: st.DataObject, unit: float, seed: int) -> None:
    slow = data.draw(st.integers(0, world - 1))
    ranks = [rounds(unit * (1.4 if rank == slow else 1.0), seed=seed + rank) for rank in range(world)]
    found = straggler(ranks)
    assert found is not None
    assert found["rank"] == slow
    assert 0.3 < found["slower_by"] < 0.5


@given(st.integers(1, 16), st.floats(0, SLOWER / 2), st.integers(0, 1000))
def test_peers_within_the_tolerance_are_all_alike(world: int, noise: float, seed: int) -> None:
    assert straggler([rounds(1.0, noise, seed + rank) for rank in range(world)]) is None


def test_a_disturbance_of_a_few_rounds_names_nobody() -> None:
    disturbed = rounds(1.0)
    disturbed[3:9] = [8.0] * 6
    assert straggler([disturbed, rounds(1.0, seed=1)]) is None


def test_a_rank_alone_or_without_a_pace_has_no_peers() -> None:
    assert straggler([rounds(1.0)]) is None
    assert straggler([rounds(1.0), []]) is None
    assert straggler([]) is None
    assert pace([[], []]) is None


def test_a_slow_moment_is_one_that_is_slower_than_the_study_so_far() -> None:
    usual = [[rounds(1.0, seed=n), rounds(1.0, seed=n + 50)] for n in range(5)]
    slow = slowness([rounds(1.0), rounds(1.5)], usual)
    assert slow is not None
    assert 0.4 < slow < 0.6
    assert slowness([rounds(1.0), rounds(1.05)], usual) is None
    assert slowness([rounds(1.5), rounds(1.5)], usual[:2]) is None  # too little is known
    assert slowness([[], []], usual) is None
