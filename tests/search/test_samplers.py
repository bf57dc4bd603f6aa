"""Which candidate comes next."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import RandomSampler, TPESampler

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.search import samplers
from autotune.search.samplers import plan

BASE = Candidate(micro_batch=1, accumulation=1, zero_stage=1, precision="bf16")
CANDIDATES = [BASE.replace(zero_stage=stage, micro_batch=micro) for stage in (0, 1, 2, 3) for micro in (1, 2, 4, 8)]


def test_auto_tries_every_candidate_in_the_order_of_the_list_where_that_fits_the_budget() -> None:
    made = plan("auto", 0, CANDIDATES, BASE, budget=16)
    assert (made.name, made.startup) == ("list", 16)
    assert made.order == [BASE, *(candidate for candidate in CANDIDATES if candidate != BASE)]


def test_auto_is_tpe_where_the_budget_is_smaller() -> None:
    made = plan("auto", 0, CANDIDATES, BASE, budget=15)
    assert (made.name, made.startup) == ("tpe", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        assert isinstance(made.sampler(0, 0), TPESampler)


def test_the_startup_is_a_quarter_of_the_budget_and_at_most_ten() -> None:
    assert [plan("tpe", 0, CANDIDATES, BASE, budget).startup for budget in (1, 8, 40, 400)] == [1, 2, 10, 10]


@pytest.mark.parametrize("search", ["auto", "tpe", "random", "grid"])
def test_every_search_begins_with_the_baseline_and_knows_every_candidate_once(search: str) -> None:
    order = plan(search, 3, CANDIDATES, BASE, 4).order
    assert order[0] == BASE
    assert sorted(map(str, order)) == sorted(map(str, CANDIDATES))


def test_random_goes_through_a_shuffled_list_which_the_seed_decides() -> None:
    one, same, other = (plan("random", seed, CANDIDATES, BASE, 4) for seed in (1, 1, 2))
    assert one.order == same.order
    assert one.order != other.order
    assert one.startup == len(CANDIDATES)
    assert isinstance(one.sampler(0, 0), RandomSampler)


def test_a_baseline_outside_the_space_is_no_part_of_the_list() -> None:
    assert plan("grid", 0, CANDIDATES, BASE.replace(precision="fp16"), 99).order == CANDIDATES


def test_an_unknown_search_is_refused() -> None:
    with pytest.raises(SettingsError, match="search=bayes is unknown"):
        plan("bayes", 0, CANDIDATES, BASE, 4)


def test_gp_without_its_extra_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(samplers.importlib.util, "find_spec", lambda name: None if name == "scipy" else real(name))
    with pytest.raises(SettingsError, match="search=gp needs scipy") as caught:
        plan("gp", 0, CANDIDATES, BASE, 4)
    assert "autotune[gp]" in caught.value.hint
