"""Candidates that compute the same train alike to rounding; one that does not is told apart."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.parity import TOLERANCES, Trace, compare, difference

LOSSES = [8.34 - 0.01 * step for step in range(18)]
NORMS = [0.54 - 0.008 * step for step in range(18)]
REFERENCE = Trace("bf16", LOSSES, NORMS)
precisions = st.sampled_from(sorted(TOLERANCES))


def rounded(trace: Trace, share: float, seed: int) -> Trace:
    """The same within a share of every tolerance."""
    chance, limits = random.Random(seed), TOLERANCES[trace.precision]

    def off(value: float, limit: float) -> float:
        return value * (1 + chance.uniform(-1, 1) * share * limit)

    losses = [off(x, limits.loss if step else limits.first_loss) for step, x in enumerate(trace.losses)]
    norms = [off(x or 0.0, limits.norm if step else limits.first_norm) for step, x in enumerate(trace.norms)]
    return replace(trace, losses=losses, norms=norms)


@given(precisions, st.floats(0, 0.95), st.integers(0, 2**32))
def test_what_differs_by_rounding_agrees_and_says_by_how_much(precision: str, share: float, seed: int) -> None:
    reference = replace(REFERENCE, precision=precision)
    found = compare(rounded(reference, share, seed), reference)
    assert found.agrees
    assert found.steps == 18
    assert found.loss is not None
    assert found.loss <= found.tolerance.loss


@given(precisions, st.floats(1.3, 100), st.integers(0, 17))
def test_a_loss_that_is_off_by_a_factor_in_any_step_is_told(precision: str, factor: float, step: int) -> None:
    reference = replace(REFERENCE, precision=precision)
    losses = [loss * factor if at == step else loss for at, loss in enumerate(LOSSES)]
    found = compare(replace(reference, losses=losses), reference)
    assert found.agrees is False
    assert "it trains differently: " in (found.reason or "")


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.8, 2.0, 8.0])
def test_a_wrong_scale_of_gradients_is_told_though_every_loss_agrees(factor: float) -> None:
    found = compare(replace(REFERENCE, norms=[norm * factor for norm in NORMS]), REFERENCE)
    assert found.agrees is False
    assert "the norm of its first gradients" in (found.reason or "")


@pytest.mark.parametrize("norm", [0.0, math.inf, math.nan])
def test_gradients_that_are_nothing_or_no_numbers_are_told_though_every_loss_agrees(norm: float) -> None:
    assert compare(replace(REFERENCE, norms=[norm] * 18), REFERENCE).agrees is False


def test_a_scale_that_is_wrong_from_the_second_step_on_is_told_and_one_odd_step_is_not() -> None:
    assert compare(replace(REFERENCE, norms=[NORMS[0], *(2 * norm for norm in NORMS[1:])]), REFERENCE).agrees is False
    assert compare(replace(REFERENCE, norms=[*NORMS[:9], 9.0, *NORMS[10:]]), REFERENCE).agrees


def test_the_first_loss_must_agree_more_closely_than_later_ones() -> None:
    for limits in TOLERANCES.values():
        assert limits.first_loss < limits.loss
        assert limits.first_norm < limits.norm


def test_of_two_precisions_the_coarser_counts() -> None:
    off = Trace("fp32", [loss * 1.0004 for loss in LOSSES], NORMS)
    assert compare(off, REFERENCE).agrees
    assert compare(off, replace(REFERENCE, precision="fp32")).agrees is False


def test_norms_that_deepspeed_did_not_keep_are_not_compared() -> None:
    for norms in ([], [None] * 18):
        found = compare(replace(REFERENCE, norms=norms), REFERENCE)
        assert (found.agrees, found.first_norm, found.norm) == (True, None, None)


def test_a_loss_that_is_no_number_never_agrees() -> None:
    assert compare(replace(REFERENCE, losses=[*LOSSES[:5], math.nan, *LOSSES[6:]]), REFERENCE).agrees is False


@pytest.mark.parametrize("crossing", range(2, 17))
def test_a_loss_that_passes_through_zero_is_judged_by_its_usual_size(crossing: int) -> None:
    """At zero itself rounding is more than any share of it."""
    falling = replace(REFERENCE, losses=[(crossing - step) * 0.4 for step in range(18)])
    assert compare(replace(falling, losses=[loss + 0.0004 for loss in falling.losses]), falling).agrees
    assert compare(replace(falling, losses=[loss + 0.2 for loss in falling.losses]), falling).agrees is False


def test_what_the_reference_did_after_the_last_common_step_does_not_count() -> None:
    burst = replace(REFERENCE, losses=[*LOSSES[:6], *[math.inf] * 12])
    off = replace(REFERENCE, losses=[2 * loss for loss in LOSSES[:6]])
    assert compare(off, burst).agrees is False


def test_too_few_steps_are_no_comparison_and_the_shorter_decides_how_many() -> None:
    assert compare(replace(REFERENCE, losses=LOSSES[:1]), REFERENCE).agrees is None
    assert compare(replace(REFERENCE, losses=LOSSES[:6]), REFERENCE).steps == 6


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_a_difference_has_no_side(a: float, b: float) -> None:
    assert difference(a, b) == difference(b, a) >= 0
