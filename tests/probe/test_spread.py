"""The spread of a median."""

from __future__ import annotations

import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.spread import median_spread


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_the_median_lies_within_its_spread_and_that_within_the_values(values: list[float]) -> None:
    median, low, high = median_spread(values)
    assert min(values) <= low <= median <= high <= max(values)
    assert median == statistics.median(values)


def test_few_values_spread_over_all_of_them_and_many_over_the_middle() -> None:
    assert median_spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median_spread([float(i) for i in range(1, 16)])[1:] == (4.0, 12.0)  # 15 values: ranks 4 and 12, 96.5 %


def test_the_true_median_is_missed_at_most_once_in_twenty() -> None:
    draw = random.Random(1)
    missed = 0
    for _ in range(2000):
        _, low, high = median_spread([draw.expovariate(1) for _ in range(15)])
        missed += not low <= 0.6931 <= high
    assert missed / 2000 <= 0.05
