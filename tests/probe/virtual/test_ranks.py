"""The rank that needs the most memory is always among those that are looked at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.virtual.ranks import EVERY, suspects

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def touched(sizes: list[int], world: int) -> list[int]:
    """Elements of the parameters that each rank's part has an element of, counted one by one."""
    owners = [parameter for parameter, size in enumerate(sizes) for _ in range(size)]
    part = -(-len(owners) // world)
    return [sum(sizes[p] for p in set(owners[rank * part : (rank + 1) * part])) for rank in range(world)]


@given(sizes, st.integers(1, 20), st.sampled_from([1, 2]))
def test_the_rank_whose_part_touches_most_is_a_suspect(sizes: list[int], world: int, zero_stage: int) -> None:
    found = suspects(sizes, world, zero_stage)
    counts = touched(sizes, world)
    assert max(counts) == max(counts[rank] for rank in found)


@given(sizes, st.integers(EVERY + 1, 1000), st.sampled_from([1, 2]))
def test_of_many_ranks_at_most_four_are_looked_at_the_last_two_among_them(
    sizes: list[int], world: int, zero_stage: int
) -> None:
    found = suspects(sizes, world, zero_stage)
    assert len(found) <= 4
    assert {world - 1, world - 2} <= set(found) <= set(range(world))
    assert found == sorted(set(found))


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_small_worlds_are_looked_at_whole(world: int, zero_stage: int) -> None:
    assert suspects([100, 1, 1], world, zero_stage) == list(range(world))


@given(sizes, st.integers(1, 1000), st.sampled_from([0, 3]))
def test_where_ranks_are_equal_one_is_enough(sizes: list[int], world: int, zero_stage: int) -> None:
    assert suspects(sizes, world, zero_stage) == [0]


def test_a_model_of_which_nothing_is_known_has_suspects_too() -> None:
    assert suspects([], 8, 2)
