"""Devices are shared out so that no two workers of a command have one in common."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autotune.errors import SettingsError
from autotune.machine import share
from autotune.machine.detect import Gpu
from autotune.machine.machine import Machine
from autotune.machine.share import occupied, shares

CPU = Machine("cpu", accelerator="cpu", devices_per_node=1)
GPU = Machine("h100_80g", accelerator="cuda", devices_per_node=2)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs and sixteen processors."""
    monkeypatch.setattr(share, "visible_gpus", lambda: [Gpu("H100", f"GPU-{n}", 80, "1") for n in range(8)])
    monkeypatch.setattr(share.os, "sched_getaffinity", lambda pid: set(range(16)))


def test_devices_are_divided_equally_and_what_is_over_stays_idle(eight: None) -> None:
    assert shares(GPU, None, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shares(GPU, [1, 3, 5, 7, 6], 2) == [[1, 3], [5, 7]]
    assert shares(CPU, None, 3) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


@pytest.mark.parametrize(
    ("devices", "parallel", "message"),
    [
        ([0, 8], 1, r"probe.devices=\[0, 8\] are not devices of this machine"),
        ([0, 0], 1, "are not devices of this machine"),
        ([], 1, "are not devices of this machine"),
        ([0, 1, 2], 2, "devices_per_node=2 does not fit in the 1 devices"),
        (None, 5, "does not fit in the 1 devices"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    eight: None, devices: list[int] | None, parallel: int, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        shares(GPU, devices, parallel)


def test_what_is_started_inside_sees_its_own_devices_and_processors(
    eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(share.os, "sched_setaffinity", lambda pid, cores: pinned.append(sorted(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, GPU-1,2,3,4,5,6,7")
    with occupied(GPU, [0, 1, 6, 7], 2, 1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    with occupied(GPU, None, 4, 0):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,GPU-1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0, GPU-1,2,3,4,5,6,7"
    assert pinned == [list(range(8, 16)), list(range(16)), list(range(4)), list(range(16))]


def test_a_share_of_the_processors_is_inherited() -> None:
    [core, *_] = sorted(os.sched_getaffinity(0))
    ask = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    with occupied(CPU, [core], 1, 0):
        inside = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    assert inside == f"{{{core}}}"
    assert len(os.sched_getaffinity(0)) == os.cpu_count() or core in os.sched_getaffinity(0)


def test_nothing_changes_where_nothing_is_asked_for() -> None:
    before = os.sched_getaffinity(0)
    with occupied(Machine("cpu", accelerator="cpu", devices_per_node=64), None, 1, 0):
        assert os.sched_getaffinity(0) == before
