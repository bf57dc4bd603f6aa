"""Predicted memory beside what others measured on GPUs that nobody here owns."""

from __future__ import annotations

from autotune.probe.virtual.prediction import Prediction
from tests.bench.cache import empty_cache
from tests.probe.virtual.published import ROWS, SOURCE, Published, peaks, predictions, settings

GB = 1e9


def main() -> None:
    """Print predicted, measured and the error of every figure that was published."""
    print(f"8.05 B model, measured by a {SOURCE}; GB of 1e9 bytes")
    with empty_cache():
        predicted = predictions()
    for row in ROWS:
        for name, found, measured in _figures(row, predicted[row.zero_stage]):
            error = found / GB / measured - 1
            print(
                f"ZeRO-{row.zero_stage}  {name:<22}{found / GB:7.3f} predicted  {measured:6.2f} measured  {error:+.2%}"
            )
    machine = settings().machine
    for row in ROWS:
        worst = predicted[row.zero_stage]
        total, has = worst.device_total / GB, machine.device_memory_bytes / GB
        print(f"ZeRO-{row.zero_stage}  verdict by rank {worst.rank}: {worst.verdict}, {total:.1f} of {has:.1f} GB")


def _figures(row: Published, found: Prediction) -> list[tuple[str, int, float]]:
    """(what, predicted bytes, measured GB) of one row."""
    ranks = list(zip(peaks(found), row.peaks, strict=True))
    if not found.ranks.keys() - {found.rank}:  # all ranks are alike
        ranks = ranks[:1]
    return [
        *((f"peak of rank {rank}", mine, theirs) for rank, (mine, theirs) in enumerate(ranks)),
        ("steady", found.steady_allocated, row.steady),
        ("reserved, worst rank", found.peak_reserved, row.reserved),
    ]
