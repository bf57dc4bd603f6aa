"""One Slurm and one sshd serve the tests of several nodes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from autotune.probe.measurement import Measurement
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.settings import Settings
from tests.commands import MARK, marked
from tests.slurm import Slurm, running_slurm, wait_for

from ..conftest import PLAIN, QUICK, settings

TWO_NODES = ("machine.nodes=2", "machine.devices_per_node=1", "probe.threads=1")
FAULTY = "model=custom", "model.factory=faulty:build", *QUICK[3:]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm of four nodes."""
    with running_slurm(nodes=4) as running:
        yield running


def two_nodes(*overrides: str) -> Settings:
    """Settings in which a probe has two nodes of one device."""
    return settings(*TWO_NODES, *overrides)


def with_fault(fault: str) -> list[str]:
    """Overrides for the model that fails (faulty.py)."""
    return [*FAULTY, f"+model.args={{fault:{fault}}}"]


def on_nodes(wanted: Settings, launcher: Launcher | None = None, steps: int = 1) -> Measurement:
    """Probe a candidate over several nodes; afterwards none of its processes is left."""
    mark, before = uuid.uuid4().hex, os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        launcher = launcher or make_launcher(wanted)
        launcher.describe = lambda directory: None  # it takes seconds, and the sweep tries it
        prober = TorchrunProber(wanted, launcher)
        measured = prober.probe(ProbeRequest(PLAIN, steps=steps))
        prober.close()
    finally:
        os.environ.pop(MARK)
        os.environ.update({MARK: before} if before else {})
    wait_for(lambda: not marked(mark), 5)
    return measured
