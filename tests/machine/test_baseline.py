"""Between probes a device must give its memory back; one that does not is set aside, and that is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autotune.errors import InfraError
from autotune.machine import baseline
from autotune.machine.baseline import SLACK, Baseline
from autotune.machine.health import GpuState, Holder
from autotune.machine.machine import GIB


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "BACK_S", 0.5)


def gpus(*used: int) -> list[GpuState]:
    stuck = [Holder(4711, "python", GIB)]
    return [GpuState(index, size, 80 * GIB, holders=stuck if size > GIB else ()) for index, size in enumerate(used)]


def reading(*moments: list[GpuState]) -> Callable[[], list[GpuState]]:
    """What is read at each moment; the last one lasts."""
    coming: Iterator[list[GpuState]] = iter(moments)
    last = moments[-1]
    return lambda: next(coming, last)


def test_a_machine_without_gpus_has_nothing_to_wait_for() -> None:
    nothing = Baseline(2, lambda: [])
    assert nothing.returned() == []
    assert nothing.spared is None


def test_devices_that_give_their_memory_back_in_time_are_used_again() -> None:
    devices = Baseline(2, reading(gpus(0, 5 * GIB), gpus(70 * GIB, 60 * GIB), gpus(SLACK, 5 * GIB)))
    assert devices.returned() == []
    assert devices.spared is None


def test_a_device_that_does_not_is_set_aside_by_name_and_another_takes_its_place() -> None:
    devices = Baseline(2, reading(gpus(0, 0, 0), gpus(0, 12 * GIB, 0)))
    (said,) = devices.returned()
    assert said.startswith("device 1 is busy with someone else's work: 12.00 GiB held by pid 4711 (python)")
    assert "set aside" in said
    assert devices.spared == [0, 2]
    assert devices.returned() == []  # said once


def test_where_too_few_are_left_the_sweep_ends_with_what_to_do() -> None:
    devices = Baseline(2, reading(gpus(0, 0), gpus(0, 12 * GIB)))
    devices.returned()
    with pytest.raises(InfraError, match="1 devices are left, and a probe takes 2") as caught:
        _ = devices.spared
    assert "nvidia-smi" in caught.value.hint
