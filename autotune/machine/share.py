"""Which of the devices here a command uses, and how they are divided among the probes that it runs at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autotune.errors import SettingsError
from autotune.machine.detect import visible_gpus
from autotune.machine.machine import Machine

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def shares(machine: Machine, devices: Sequence[int] | None, parallel: int) -> list[list[int]]:
    """The devices of each of `parallel` workers; on CPU a device is a processor.

    Args:
        machine: of which one node is here.
        devices: numbers of those to be used, counted as CUDA and the kernel count them; None for all.
        parallel: workers.

    Raises:
        SettingsError: a device is not here, or the machine does not fit in a share.
    """
    cpu = machine.accelerator == "cpu"
    word = "processors" if cpu else "devices"
    here = sorted(os.sched_getaffinity(0)) if cpu else list(range(len(visible_gpus())))
    wanted = list(devices) if devices is not None else here
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(here):
        raise SettingsError(
            f"probe.devices={wanted} are not {word} of this machine, which has {here}",
            "name each once, e.g. probe.devices=[0,1]; leave it out for all of them",
        )
    each = len(wanted) // parallel
    if machine.devices_per_node > each:
        raise SettingsError(
            f"machine.devices_per_node={machine.devices_per_node} does not fit in the {each} {word} that each of "
            f"{parallel} probes at a time has (of {len(wanted)})",
            "lower machine.devices_per_node or probe.parallel, or name more of them with probe.devices=[…]",
        )
    return [wanted[index * each : (index + 1) * each] for index in range(parallel)]


@contextmanager
def occupied(machine: Machine, devices: Sequence[int] | None, parallel: int, index: int) -> Iterator[None]:
    """Whatever is started inside the block runs on one worker's share, and on processors that no other one has.

    Raises:
        SettingsError: see shares.
    """
    if parallel == 1 and devices is None:
        yield
        return
    mine = shares(machine, devices, parallel)[index]
    processors, visible = os.sched_getaffinity(0), os.environ.get(_VISIBLE)
    if machine.accelerator == "cpu":
        os.sched_setaffinity(0, mine)
    else:
        each = len(processors) // parallel
        if each:
            os.sched_setaffinity(0, sorted(processors)[index * each : (index + 1) * each])
        names = visible.split(",") if visible is not None else [str(gpu) for gpu in range(len(visible_gpus()))]
        os.environ[_VISIBLE] = ",".join(names[device].strip() for device in mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)
        if visible is not None:
            os.environ[_VISIBLE] = visible
        else:
            os.environ.pop(_VISIBLE, None)
