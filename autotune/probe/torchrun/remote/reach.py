"""What a launcher reaches from here, looked at before a study is begun."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import SettingsError
from autotune.probe.torchrun.remote.allocation import Allocation, slurm
from autotune.probe.torchrun.remote.hosts import read_hostfile
from autotune.settings import Settings

REMOTE = ("slurm", "hosts")
"""The launchers whose ranks run elsewhere: what a node really is, the node program looks at."""


def check_reach(settings: Settings) -> None:
    """See that the launcher reaches the machine's nodes.

    Raises:
        SettingsError: there are not so many, or not of that kind.
        InfraError: Slurm does not answer.
    """
    machine = settings.machine
    if settings.launcher.name == "hosts":
        if not settings.launcher.hostfile:
            raise SettingsError("launcher=hosts needs a hostfile", "launcher.hostfile=PATH, a line `host slots=8` each")
        hosts = read_hostfile(Path(settings.launcher.hostfile))
        if (machine.nodes, machine.devices_per_node) != (len(hosts), hosts[0].slots):
            raise SettingsError(
                f"the hostfile has {len(hosts)} hosts of {hosts[0].slots} slots, and machine={machine.name} has "
                f"{machine.nodes} nodes of {machine.devices_per_node} devices",
                f"machine.nodes={len(hosts)} machine.devices_per_node={hosts[0].slots}, or another hostfile",
            )
    if settings.launcher.name == "slurm":
        slurm("sinfo", "--noheader")
        job = os.environ.get("SLURM_JOB_ID")
        there = Allocation(job).record().get("NumNodes", "1") if job else ""
        if job and machine.nodes > int(there.partition("-")[0]):
            raise SettingsError(
                f"machine.nodes={machine.nodes}, and Slurm's allocation {job} has {there}",
                "leave the allocation, and one is submitted; or start within a larger one",
            )
