"""What is said of devices and host before a study, from plain records of what was read."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import InfraError
from autotune.machine import health
from autotune.machine.detect import Gpu
from autotune.machine.health import GpuState, Holder, HostState, host_state, look, of_gpu, of_host
from autotune.machine.machine import GIB, Machine

IDLE = GpuState(index=3, used_bytes=GIB // 4, total_bytes=80 * GIB, busy_percent=0, events=1)
QUIET = HostState(
    cores=64, busy_cores=0.3, busiest="pid 1 (systemd)", available_bytes=900 * GIB, total_bytes=1000 * GIB
)


def changed(state: Any, **changes: Any) -> Any:
    return dataclasses.replace(state, **changes)


class TestDevices:
    def test_an_idle_one_is_nothing_to_speak_of(self) -> None:
        assert of_gpu(IDLE) == []

    def test_a_busy_one_is_told_with_who_holds_what(self) -> None:
        busy = changed(IDLE, used_bytes=int(12.3 * GIB), holders=[Holder(4711, "python", 12 * GIB)])
        assert of_gpu(busy) == ["device 3 is busy with someone else's work: 12.30 GiB held by pid 4711 (python)"]
        unseen = changed(busy, holders=[])
        assert "held by processes that cannot be seen from here" in of_gpu(unseen)[0]
        computing = changed(IDLE, busy_percent=90)
        assert of_gpu(computing) == ["device 3 is busy with someone else's work for 90 % of the time"]

    @pytest.mark.parametrize("events", [0x08, 0x20, 0x40, 0x80, 0x40 | 0x80])
    def test_a_throttled_one_is_told_with_why(self, events: int) -> None:
        assert len(of_gpu(changed(IDLE, events=events))) == events.bit_count()

    @pytest.mark.parametrize("events", [0, 0x1, 0x2, 0x4, 0x10, 0x100, None])
    def test_being_idle_set_to_a_clock_or_at_a_power_limit_is_no_fault(self, events: int | None) -> None:
        assert of_gpu(changed(IDLE, events=events)) == []

    def test_faulty_memory_and_partitions_are_told(self) -> None:
        assert "waits for a restart" in of_gpu(changed(IDLE, repair_pending=True))[0]
        assert "MIG" in of_gpu(changed(IDLE, partitioned=True))[0]

    def test_one_on_which_nothing_can_run_ends_the_study_before_it_begins(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = changed(IDLE, used_bytes=79 * GIB, holders=[Holder(4711, "python", 79 * GIB)])
        monkeypatch.setattr(health, "gpu_states", lambda: [changed(IDLE, index=0), full])
        monkeypatch.setattr(health, "host_state", lambda: QUIET)
        assert look(Machine("one", devices_per_node=1)) == []  # the full one is not used
        with pytest.raises(InfraError, match=r"79\.00 GiB held by pid 4711") as caught:
            look(Machine("two", devices_per_node=2))
        assert "CUDA_VISIBLE_DEVICES" in caught.value.hint


class TestHost:
    def test_a_quiet_one_is_nothing_to_speak_of(self) -> None:
        assert of_host(QUIET) == []

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"busy_cores": 5.0}, "busy with someone else's work: 5.0 of 64 cores, most by pid 1 (systemd)"),
            ({"quota_cores": 1.5}, "the control group allows 1.5 of 64 cores"),
            ({"available_bytes": 300 * GIB}, "someone else's work holds 700.00 GiB of 1,000.00 GiB host memory"),
            ({"swapped_bytes": 100 * GIB}, "100.00 GiB of host memory is swapped out"),
        ],
    )
    def test_each_trouble_is_told(self, changes: dict[str, Any], said: str) -> None:
        [sentence] = of_host(changed(QUIET, **changes))
        assert said in sentence

    def test_the_one_here_can_be_read(self) -> None:
        here = host_state()
        assert 0 < here.available_bytes <= here.total_bytes
        assert 0 <= here.busy_cores < 10_000


class Nvml(SimpleNamespace):
    """As much of NVML as is asked for; a device that has no remapped rows and no MIG."""

    NVMLError = type("NVMLError", (Exception,), {})
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        super().__init__(asked=[])

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> Any:
        return SimpleNamespace(used=3 * GIB, total=81 * GIB, reserved=GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> Any:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        return [SimpleNamespace(pid=1, usedGpuMemory=None)]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x40


def test_what_nvml_tells_is_read_and_what_it_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setattr(health, "visible_gpus", lambda: [Gpu("H100", "GPU-1", 80 * GIB, "570")])
    [state] = health.gpu_states()
    assert (state.index, state.used_bytes, state.total_bytes, state.busy_percent) == (0, 3 * GIB, 80 * GIB, 40)
    assert state.holders[0].pid == 1
    assert state.events == 0x40
    assert state.repair_pending is None
    assert state.partitioned is None
