"""Which processors the ranks of one node run on, and with how many threads."""

from __future__ import annotations

from collections.abc import Sequence


def placement(available: Sequence[int], ranks: int, threads: int | None) -> tuple[int, list[list[int]]]:
    """(threads per rank, processors of each local rank): cores shared equally, the rest left idle.

    Where there are fewer cores than ranks, ranks share them and nothing is pinned.

    Args:
        available: the processors that may be used.
        ranks: of the node.
        threads: per rank; None for as many as there are processors for.
    """
    share = len(available) // ranks
    threads = threads or max(1, share)
    if share == 0 or threads > share:
        return threads, [[] for _ in range(ranks)]
    return threads, [list(available[rank * share : (rank + 1) * share]) for rank in range(ranks)]
