"""A measurement stands for another exactly where everything that matters is equal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.store.reuse import reuse_key
from autotune.workload.workload import Model, Workload

CONDITIONS: dict[str, Any] = {
    "candidate": Candidate(micro_batch=1, accumulation=16, zero_stage=1, precision="bf16"),
    "workload": Workload(Model("m", type="gpt2")),
    "machine": Machine("cpu", device_memory_gib=1.0, driver="1"),
    "probe_kind": "torchrun",
    "launcher": "warm",
    "protocol": {"steps": 5, "confirmation": False},
    "environment": {"torch": "2.13", "OMP_NUM_THREADS": 1},
}


@pytest.mark.parametrize(
    "change",
    [
        {"candidate": CONDITIONS["candidate"].replace(micro_batch=2)},
        {"workload": dataclasses.replace(CONDITIONS["workload"], attention="eager")},
        {"machine": dataclasses.replace(CONDITIONS["machine"], driver="2")},
        {"probe_kind": "virtual"},
        {"launcher": "cold"},
        {"protocol": {"steps": 5, "confirmation": True}},
        {"environment": {"torch": "2.14", "OMP_NUM_THREADS": 1}},
        {"environment": {"torch": "2.13"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_matters_changes_the_key(change: dict[str, Any]) -> None:
    assert reuse_key(**CONDITIONS) != reuse_key(**(CONDITIONS | change))


def test_headroom_and_the_order_of_names_do_not_matter() -> None:
    same = CONDITIONS | {
        "machine": dataclasses.replace(CONDITIONS["machine"], headroom=0.3),
        "environment": {"OMP_NUM_THREADS": 1, "torch": "2.13"},
    }
    assert reuse_key(**CONDITIONS) == reuse_key(**same)
