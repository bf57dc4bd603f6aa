"""Which candidates exist: each program once, none that DeepSpeed refuses, and a ledger that adds up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autotune.errors import NothingFeasible, SettingsError
from autotune.machine.machine import Machine
from autotune.settings import Settings, SpaceSettings, compose_settings
from autotune.space.check import findings
from autotune.space.config import deepspeed_config
from autotune.space.space import Space
from autotune.workload.workload import Workload

SPACES = ["core", "comm", "zero3", "multinode", "allocator", "full"]
POOL: dict[str, list[Any]] = {
    "micro_batch": [1, 2, 3, 4],
    "accumulation": [1, 2, 4],
    "zero_stage": [0, 1, 2, 3],
    "precision": ["bf16", "fp16", "fp32"],
    "offload_optimizer": ["none", "cpu", "nvme"],
    "offload_param": ["none", "cpu"],
    "checkpoint_blocks": ["none", "half", "all"],
    "checkpoint_part": ["whole", "mlp"],
    "checkpoint_input": ["device", "cpu"],
    "overlap_comm": [True, False],
    "reduce_bucket_size": [1000, 500_000_000],
    "allgather_bucket_size": [1000, 1001, 500_000_000],
    "stage3_prefetch_bucket_size": [0, 50_000_000],
    "stage3_param_persistence_threshold": [0, 100_000],
    "stage3_max_live_parameters": [1000, 1_000_000_000],
    "stage3_max_reuse_distance": [1000, 1_000_000_000],
    "zero_hpz_partition_size": [1, 2, 3, 16],
    "expandable_segments": [False, True],
    "garbage_collection_threshold": [None, 0.8],
}


def sweep(space: dict[str, Any], accelerator: str = "cuda", devices: int = 2, **workload: Any) -> Settings:
    return Settings(
        machine=Machine(name="here", accelerator=accelerator, devices_per_node=devices),
        workload=Workload(**workload),
        space=SpaceSettings(name="here", nvme_path="/nvme", **space),
    )


@st.composite
def sweeps(draw: st.DrawFn) -> Settings:
    space = {
        name: draw(st.lists(st.sampled_from(pool), unique=True, min_size=1, max_size=3))
        for name, pool in POOL.items()
        if draw(st.integers(0, 2)) == 0
    }
    assume(math.prod(len(values) for values in space.values()) <= 400)
    return sweep(
        space,
        draw(st.sampled_from(["cpu", "cuda"])),
        draw(st.sampled_from([1, 2, 3, 4])),
        global_batch=draw(st.sampled_from([None, 8, 24])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        grad_accum_dtype=draw(st.sampled_from([None, "fp32"])),
    )


def made(given_settings: Settings) -> Space:
    try:
        return Space(given_settings)
    except (SettingsError, NothingFeasible):
        assume(False)
        raise


exploring = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@exploring
@given(sweeps())
def test_the_space_is_what_every_combination_comes_down_to_each_once(swept: Settings) -> None:
    space = made(swept)
    combinations = [dict(zip(space.knobs, values, strict=True)) for values in itertools.product(*space.knobs.values())]
    reached = [space.canonical(raw) for raw in combinations]
    assert {candidate for candidate in reached if candidate is not None} == set(space.candidates)
    assert len({candidate.key for candidate in space.candidates}) == len(space.candidates)
    assert space.ledger.combinations == len(combinations)
    assert sum(space.ledger.removed.values()) + space.ledger.remaining == len(combinations)
    assert space.ledger.remaining == len(space.candidates)


@exploring
@given(sweeps())
def test_canonical_undoes_raw(swept: Settings) -> None:
    space = made(swept)
    for candidate in space.candidates:
        raw = space.raw(candidate)
        assert all(raw[name] in values for name, values in space.knobs.items())
        assert space.canonical(raw) == candidate


@exploring
@given(sweeps())
def test_a_candidates_own_values_are_canonical_already(swept: Settings) -> None:
    space = made(swept)
    for candidate in space.candidates:
        assert space.canonical(dataclasses.asdict(candidate)) == candidate


@exploring
@given(sweeps())
def test_equal_programs_have_equal_keys(swept: Settings) -> None:
    """The same config with the same checkpointing and allocator is the same program: so no two candidates share it."""
    space = made(swept)
    outside = ("checkpoint_blocks", "checkpoint_part", "checkpoint_input")
    outside += ("expandable_segments", "garbage_collection_threshold")
    programs = {
        json.dumps(
            [
                deepspeed_config(candidate, swept.workload, swept.machine, "/nvme"),
                [getattr(candidate, name) for name in outside],
            ],
            sort_keys=True,
        )
        for candidate in space.candidates
    }
    assert len(programs) == len(space.candidates)


@exploring
@given(sweeps())
def test_no_candidates_config_breaks_a_rule(swept: Settings) -> None:
    for candidate in made(swept).candidates[:50]:
        config = deepspeed_config(candidate, swept.workload, swept.machine, "/nvme")
        assert findings(config, swept.workload, swept.machine) == []


@exploring
@given(sweeps())
def test_micro_batch_rises_while_the_other_knobs_stay(swept: Settings) -> None:
    space = made(swept)
    others = [candidate.replace(micro_batch=1, accumulation=1) for candidate in space.candidates]
    for _, group in itertools.groupby(zip(others, space.candidates, strict=True), key=lambda pair: pair[0]):
        sizes = [(candidate.accumulation, candidate.micro_batch) for _, candidate in group]
        if swept.workload.global_batch is None:
            assert all(b[1] > a[1] for a, b in itertools.pairwise(sizes) if a[0] == b[0])
        else:
            assert [micro for _, micro in sizes] == sorted(micro for _, micro in sizes)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("machine", ["cpu", "a100_80g"])
def test_the_spaces_that_come_with_autotune_hold_candidates(name: str, machine: str) -> None:
    swept = compose_settings([f"space={name}", f"machine={machine}"])
    space = Space(swept)
    assert 100 <= len(space.candidates) <= 100_000
    for candidate in (*space.candidates[:: len(space.candidates) // 60], space.baseline):
        config = deepspeed_config(candidate, swept.workload, swept.machine)
        assert findings(config, swept.workload, swept.machine) == []


def test_spaces_share_their_baseline_but_for_what_they_list() -> None:
    found = [Space(compose_settings([f"space={name}", "machine=cpu"])).baseline for name in SPACES]
    baselines = {baseline.replace(reduce_bucket_size=None, allgather_bucket_size=None) for baseline in found}
    assert len(baselines) == 1
    baseline = baselines.pop()
    assert (baseline.zero_stage, baseline.micro_batch, baseline.offload_optimizer) == (1, 1, None)
    assert baseline.checkpoint_blocks == "none"


def test_the_baseline_need_not_lie_in_the_space() -> None:
    space = Space(sweep({"zero_stage": 3}))
    assert space.baseline not in space
    with pytest.raises(KeyError):
        space.raw(space.baseline)


def test_a_knob_left_out_carries_deepspeeds_default_where_it_has_an_effect() -> None:
    by_stage = {candidate.zero_stage: candidate for candidate in Space(sweep({"zero_stage": [0, 1, 3]})).candidates}
    assert (by_stage[0].overlap_comm, by_stage[0].reduce_bucket_size) == (None, None)
    assert (by_stage[1].overlap_comm, by_stage[1].reduce_bucket_size) == (False, 500_000_000)
    assert (by_stage[3].overlap_comm, by_stage[3].allgather_bucket_size) == (True, None)
    assert by_stage[3].stage3_prefetch_bucket_size == 50_000_000
    assert (by_stage[1].checkpoint_blocks, by_stage[1].checkpoint_part) == ("none", None)


def test_listing_a_default_and_leaving_it_out_are_the_same_program() -> None:
    listed = Space(sweep({"zero_stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": 50_000_000}))
    assert listed.candidates == Space(sweep({"zero_stage": 3})).candidates


def test_accumulation_follows_from_the_global_batch() -> None:
    space = Space(sweep({"micro_batch": [1, 2, 3, 4]}, global_batch=16))
    assert "accumulation" not in space.knobs
    assert [(c.micro_batch, c.accumulation) for c in space.candidates] == [(1, 8), (2, 4), (4, 2)]
    assert space.ledger.removed == {"batch_identity": 1}


def test_listed_accumulations_narrow_a_fixed_global_batch() -> None:
    space = Space(sweep({"micro_batch": [1, 2, 4], "accumulation": [2, 4]}, global_batch=16))
    assert [(c.micro_batch, c.accumulation) for c in space.candidates] == [(2, 4), (4, 2)]


def test_a_free_global_batch_leaves_accumulation_free() -> None:
    assert Space(sweep({})).knobs["accumulation"] == [1, 2, 4, 8, 16]
    assert [c.accumulation for c in Space(sweep({"accumulation": [3]})).candidates] == [3]


@pytest.mark.parametrize(
    ("space", "batch", "hint"),
    [
        ({"micro_batch": [2, 4]}, 7, "workload.global_batch=4, workload.global_batch=8"),
        ({"micro_batch": [2, 4]}, 1, "workload.global_batch=4"),
        ({"micro_batch": [2], "accumulation": [3]}, 16, "workload.global_batch=12"),
    ],
)
def test_a_global_batch_that_nothing_divides_names_the_nearest_that_work(
    space: dict[str, Any], batch: int, hint: str
) -> None:
    with pytest.raises(SettingsError, match=f"workload.global_batch={batch} on 2 devices") as error:
        Space(sweep(space, global_batch=batch))
    assert hint in error.value.hint


def test_nvme_is_refused_without_its_path() -> None:
    swept = sweep({"offload_param": ["none", "nvme"], "zero_stage": 3})
    swept.space.nvme_path = None
    with pytest.raises(SettingsError, match=r"space.offload_param lists nvme") as error:
        Space(swept)
    assert "space.nvme_path=" in error.value.hint


def test_nvme_below_stage_3_is_the_cpu_that_deepspeed_makes_of_it() -> None:
    space = Space(sweep({"zero_stage": [2, 3], "offload_optimizer": ["cpu", "nvme"], "accumulation": 1}))
    assert [(c.zero_stage, c.offload_optimizer) for c in space.candidates] == [(2, "cpu"), (3, "cpu"), (3, "nvme")]
    assert space.ledger.removed == {"nvme_below_stage3": 1}


def test_the_allocators_knobs_fold_away_on_processors() -> None:
    knobs = {"expandable_segments": [False, True], "garbage_collection_threshold": [None, 0.8], "accumulation": 1}
    assert len(Space(sweep(knobs, "cpu")).candidates) == 1
    on_cuda = Space(sweep(knobs)).candidates
    assert [(c.expandable_segments, c.garbage_collection_threshold) for c in on_cuda] == [
        (False, None),
        (False, 0.8),
        (True, None),
    ]


def test_a_space_that_deepspeed_refuses_altogether_says_why() -> None:
    with pytest.raises(NothingFeasible) as error:
        Space(sweep({"precision": "fp16"}, "cpu"))
    assert "fp16_cpu" in error.value.hint


def test_too_many_candidates_are_refused_with_the_knobs_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.space.space.MAX_CANDIDATES", 1000)
    many = {"low": 2, "high": 100, "step": 2}
    with pytest.raises(SettingsError, match="more than 1,000 candidates") as error:
        Space(sweep({"zero_stage": 1, "reduce_bucket_size": many, "allgather_bucket_size": many}))
    assert "space.reduce_bucket_size=" in error.value.hint


def test_the_ledger_reads_as_a_sum() -> None:
    lines = Space(sweep({"zero_stage": [0, 3], "offload_param": ["none", "cpu"]}, global_batch=8)).ledger.summary()
    assert lines.splitlines()[0] == "4 combinations"
    assert lines.splitlines()[1].startswith("-1 offload_param_below_stage3: Parameters are offloaded at stage 3 only")
    assert lines.splitlines()[-1] == "3 candidates"


def test_the_digest_is_that_of_the_choices() -> None:
    one, other = Space(sweep({"zero_stage": [1, 2]})), Space(sweep({"zero_stage": [1, 2]}))
    assert one.digest == other.digest != Space(sweep({"zero_stage": [1, 3]})).digest
