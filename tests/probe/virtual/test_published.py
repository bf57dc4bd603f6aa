"""What was measured on GPUs that nobody here owns is what is predicted."""

from __future__ import annotations

import pytest

from autotune.probe.virtual.prediction import Prediction, Verdict
from tests.probe.virtual.published import ROWS, Published, peaks, predictions, settings

GB = 1e9
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"ZeRO-{row.zero_stage}")


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Prediction]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return predictions()


@rows
def test_the_peak_of_every_rank_is_the_measured_one_within_3_per_mille(
    predicted: dict[int, Prediction], row: Published
) -> None:
    assert peaks(predicted[row.zero_stage]) == pytest.approx([peak * GB for peak in row.peaks], rel=0.003)


@rows
def test_what_is_left_between_steps_is_the_measured_within_3_per_mille(
    predicted: dict[int, Prediction], row: Published
) -> None:
    assert predicted[row.zero_stage].steady_allocated == pytest.approx(row.steady * GB, rel=0.003)


@rows
def test_what_the_allocator_reserves_is_the_measured_within_8_percent(
    predicted: dict[int, Prediction], row: Published
) -> None:
    assert predicted[row.zero_stage].peak_reserved == pytest.approx(row.reserved * GB, rel=0.08)


def test_the_verdict_is_that_of_the_rank_that_needs_most(predicted: dict[int, Prediction]) -> None:
    found, machine = predicted[1], settings().machine
    assert found.ranks[found.rank] == found.peak_allocated == max(found.ranks.values())
    assert found.rank == 3
    assert found.device_total > found.peak_reserved > max(found.ranks.values())
    assert (found.device_total <= machine.usable_bytes) == (found.verdict is Verdict.FITS)
