"""Memory that rises from step to step is told from memory that only moves."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from autotune.machine.machine import Machine
from autotune.probe.creep import FLOOR, HORIZON, at_risk, rate

MIB = 2**20
MACHINE = Machine(name="test", nodes=2, devices_per_node=2, device_memory_gib=80.0, host_memory_gib=500.0)
lengths = st.integers(11, 40)


def leaking(steps: int, per_step: float, noise: float = 0.0, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [int(1000 * MIB + per_step * step + chance.uniform(-noise, noise)) for step in range(steps)]


@given(st.lists(st.integers(0, FLOOR), max_size=40))
def test_what_stays_within_the_floor_never_rises(sizes: list[int]) -> None:
    assert rate(sizes) == 0


def test_one_steady_series_in_a_thousand_at_most_is_taken_for_a_rising_one() -> None:
    """Noise of any size rises by chance; what chance does is counted, with seeds that stay the same."""
    risen = [seed for seed in range(6000) if rate(leaking(15 + seed % 25, 0, (1 + seed % 90) * 10 * MIB, seed))]
    assert len(risen) <= 6


@given(lengths, st.floats(2 * MIB, 1000 * MIB), st.floats(0, 0.25), st.integers(0, 2**32))
def test_a_leak_above_the_floor_always_rises_at_about_its_rate(
    steps: int, per_step: float, noise: float, seed: int
) -> None:
    found = rate(leaking(steps, per_step, noise * per_step, seed))
    assert 0.7 * per_step < found < 1.3 * per_step


@given(lengths, st.integers(1, 1000))
def test_what_fills_up_in_the_first_third_and_then_is_steady_does_not_rise(steps: int, size: int) -> None:
    assert rate([min(step, steps // 3) * size * MIB for step in range(steps)]) == 0


def test_of_fewer_than_eleven_steps_nothing_is_said() -> None:
    assert rate(leaking(10, 100 * MIB)) == 0
    assert rate(leaking(11, 100 * MIB)) == 100 * MIB


def test_one_late_jump_is_no_trend_and_a_staircase_is() -> None:
    assert rate([100 * MIB] * 10 + [200 * MIB] * 5) == 0
    assert rate([(step // 2) * 20 * MIB for step in range(15)]) > 0


def test_falling_memory_does_not_rise() -> None:
    assert rate([1000 * MIB - step * 10 * MIB for step in range(20)]) == 0


def steps_of(*ranks: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    steady = {"device": [MIB] * 15, "host": [MIB] * 15, "retries": [3] * 15}
    return [{**steady, **rank} for rank in ranks]


def test_a_leak_is_told_with_its_rank_its_rate_and_when_memory_is_full() -> None:
    found = at_risk(steps_of({}, {"device": leaking(15, 10 * MIB)}, {}, {}), MACHINE, 56 * 1024 * MIB, 0)
    assert found is not None
    assert "device memory of rank 1 grows by 10.00 MiB a step" in found
    assert "20.00 GiB) is full after 2,048 steps" in found


def test_a_leak_that_fills_nothing_in_thousands_of_steps_is_no_risk() -> None:
    slow = steps_of({"device": leaking(15, MIB)}, {}, {}, {})
    assert at_risk(slow, MACHINE, 76 * 1024 * MIB - (HORIZON + 1) * MIB, 0) is None
    assert at_risk(slow, MACHINE, 76 * 1024 * MIB - (HORIZON - 1) * MIB, 0) is not None


def test_ranks_of_a_node_fill_their_host_together() -> None:
    leak = {"host": leaking(15, 20 * MIB)}
    assert at_risk(steps_of(leak, {}, leak, {}), MACHINE, 0, 250 * 1024 * MIB) is None
    found = at_risk(steps_of({}, {}, leak, leak), MACHINE, 0, 250 * 1024 * MIB)
    assert found is not None
    assert "host memory of node 1 grows by 40.00 MiB a step" in found


def test_an_allocator_that_gives_its_cache_back_again_and_again_is_a_risk_and_once_is_not() -> None:
    once, again = [3] * 7 + [4] * 8, [3] * 4 + [4] * 5 + [6] * 6
    assert at_risk(steps_of({}, {"retries": once}, {}, {}), MACHINE, 0, 0) is None
    found = at_risk(steps_of({}, {"retries": again}, {}, {}), MACHINE, 0, 0)
    assert found is not None
    assert "the allocator of rank 1 had to give its cache back 3 times in 15 steps" in found


def test_of_meters_that_were_not_read_nothing_is_said() -> None:
    assert at_risk([], MACHINE, 0, 0) is None
    assert at_risk([{}], MACHINE, 0, 0) is None
