"""How a person writes choices, and what is said about those that cannot mean anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.settings import SpaceSettings
from autotune.space.knobs import BY_NAME, KNOBS, choices, listed


def test_every_knob_is_a_setting_and_a_field_of_the_candidate() -> None:
    names = {knob.name for knob in KNOBS}
    assert names == {field.name for field in dataclasses.fields(Candidate)}
    assert names | {"name", "nvme_path"} == {field.name for field in dataclasses.fields(SpaceSettings)}


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("zero_stage", 3, [3]),
        ("micro_batch", [4, 1, 2], [4, 1, 2]),
        ("micro_batch", {"low": 1, "high": 20, "log": True}, [1, 2, 4, 8, 16]),
        ("micro_batch", {"low": 3, "high": 20, "log": True}, [4, 8, 16]),
        ("micro_batch", {"low": 2, "high": 9, "step": 3}, [2, 5, 8]),
        ("micro_batch", {"low": 2, "high": 2, "step": 1, "log": False}, [2]),
        ("garbage_collection_threshold", {"low": 0.6, "high": 0.8, "step": 0.1}, [0.6, 0.7, 0.8]),
        ("garbage_collection_threshold", [None, 0.8], [None, 0.8]),
        ("reduce_bucket_size", 1e7, [10_000_000]),
        ("offload_optimizer", ["none", "cpu"], [None, "cpu"]),
        ("offload_param", [None, "cpu"], [None, "cpu"]),
        ("checkpoint_blocks", [None, "half"], ["none", "half"]),
        ("overlap_comm", [True, False], [True, False]),
        ("precision", "fp16", ["fp16"]),
    ],
)
def test_a_scalar_fixes_a_list_chooses_and_a_mapping_is_a_range(name: str, setting: Any, expected: list[Any]) -> None:
    values = choices(BY_NAME[name], setting)
    assert values == expected
    assert [type(value) for value in values] == [type(value) for value in expected]


@pytest.mark.parametrize(
    ("name", "setting", "what"),
    [
        ("zero_stage", 7, "cannot be 7: it may be a whole number from 0 to 3"),
        ("zero_stage", [], "is an empty list"),
        ("zero_stage", [1, 1], "lists 1 twice"),
        ("zero_stage", [1, None], "cannot be null inside a list"),
        ("zero_stage", True, "cannot be true"),
        ("zero_stage", "2", 'cannot be "2"'),
        ("zero_stage", 1.5, "cannot be 1.5"),
        ("micro_batch", 0, "cannot be 0: it may be a whole number of at least 1"),
        ("micro_batch", [[1]], "cannot be [1]"),
        ("micro_batch", {"low": 8, "high": 1, "log": True}, "has a range from 8 to 1"),
        ("micro_batch", {"low": 1, "high": 8}, "neither step nor log"),
        ("micro_batch", {"low": 1, "high": 8, "log": True, "step": 1}, "both step and log"),
        ("micro_batch", {"low": 1, "high": 8, "log": 1}, "log=1"),
        ("micro_batch", {"low": 1, "high": 8, "step": 0}, "step=0"),
        ("micro_batch", {"low": 1, "high": 8, "step": 0.5}, "step=0.5"),
        ("micro_batch", {"low": 1, "high": 8, "step": "1"}, 'step="1"'),
        ("micro_batch", {"low": 1, "step": 1}, "without both low and high"),
        ("micro_batch", {"low": 1, "high": "8", "log": True}, 'cannot be "8"'),
        ("micro_batch", {"low": 5, "high": 7, "log": True}, "without a power of two between 5 and 7"),
        ("micro_batch", {"low": 1, "high": 8, "steps": 1}, "with steps"),
        ("micro_batch", {"low": 1, "high": 1e6, "step": 1}, "1000000 values"),
        ("stage3_max_live_parameters", {"low": 0, "high": 8, "log": True}, "whole numbers from 1"),
        ("garbage_collection_threshold", {"low": 0.5, "high": 0.8, "log": True}, "whole numbers from 1"),
        ("garbage_collection_threshold", 1.5, "cannot be 1.5"),
        ("offload_optimizer", "gpu", 'cannot be "gpu": it may be one of none, cpu, nvme'),
        ("offload_optimizer", {"low": 1, "high": 2, "step": 1}, "cannot be a range"),
        ("checkpoint_part", "none", 'cannot be "none": it may be one of whole, attention, mlp'),
        ("overlap_comm", 1, "cannot be 1: it may be true or false"),
        ("precision", "fp8", 'cannot be "fp8": it may be one of fp32, fp16, bf16'),
    ],
)
def test_what_cannot_mean_anything_is_refused_by_name_with_a_hint(name: str, setting: Any, what: str) -> None:
    with pytest.raises(SettingsError) as error:
        choices(BY_NAME[name], setting)
    assert error.value.message.startswith(f"space.{name} ")
    assert what in error.value.message
    assert f"space.{name}=" in error.value.hint


def test_a_knob_that_is_left_out_is_not_listed() -> None:
    assert listed(SpaceSettings(zero_stage=3), 8) == {"zero_stage": [3]}


@pytest.mark.parametrize(
    ("setting", "devices", "expected"),
    [("node", 8, [8]), ([1, "node"], 8, [1, 8]), ([1, "node"], 1, [1]), ([1, 4], 8, [1, 4])],
)
def test_hpz_over_one_node_is_written_as_the_word_node(setting: Any, devices: int, expected: list[int]) -> None:
    assert listed(SpaceSettings(zero_hpz_partition_size=setting), devices) == {"zero_hpz_partition_size": expected}
