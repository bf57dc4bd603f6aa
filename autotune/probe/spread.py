"""The median of a few measurements and its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the median and its 95 % confidence interval, from order statistics.

    The interval between the k-th smallest and the k-th largest of n values misses the true median with probability
    2·P(Binomial(n, ½) < k), whatever their distribution; k is the largest for which that is at most 5 %. Below six
    values no k will do, and the interval is all of them (94 % for five, 75 % for three).
    """
    ordered = sorted(values)
    n = len(ordered)
    k, missed = 0, 0.0
    while k < n // 2:
        missed += 2 * math.comb(n, k) / 2**n
        if missed > 0.05:
            break
        k += 1
    k = max(k, 1)
    return statistics.median(ordered), ordered[k - 1], ordered[n - k]
