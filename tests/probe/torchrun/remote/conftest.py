"""One Slurm and one sshd serve the tests of several nodes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from autotune.probe.measurement import Measurement
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.probe.torchrun.remote.launcher import Remote
from autotune.settings import Settings
from tests.commands import MARK, marked, wait_for
from tests.slurm import Slurm, running_slurm

from ..conftest import PLAIN, QUICK, settings

TWO_NODES = ("machine.nodes=2", "machine.devices_per_node=1", "probe.threads=1")
FAULTY = "model=custom", "model.factory=faulty:build", *QUICK[3:]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A Slurm of four nodes."""
    with running_slurm(nodes=4) as running:
        yield running


def with_fault(fault: str) -> list[str]:
    """Overrides for the model that fails (faulty.py)."""
    return [*FAULTY, f"+model.args={{fault:{fault}}}"]


@dataclass
class Nodes:
    """A launcher of two nodes, whose processes are known by a mark."""

    wanted: Settings
    launcher: Remote
    mark: str

    def probe(self, steps: int = 1) -> Measurement:
        """Probe a candidate; afterwards none of its processes is left."""
        prober = TorchrunProber(self.wanted, self.launcher)
        measured = prober.probe(ProbeRequest(PLAIN, steps=steps))
        wait_for(lambda: not marked(self.mark), 15)
        return measured


def two_nodes(*overrides: str) -> Nodes:
    """A launcher in which a probe has two nodes of one device."""
    wanted, mark = settings(*TWO_NODES, *overrides), uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        launcher = make_launcher(wanted)
    assert isinstance(launcher, Remote)
    launcher.describe = lambda directory: None  # it takes seconds, and the sweep tries it
    return Nodes(wanted, launcher, mark)
