"""Many warm probes in a row: what the controller, its host and the fork server hold must not grow.

`make bench-soak` runs 200; a test runs fewer.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.probe.measurement import Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.settings import compose_settings
from tests.probe.torchrun.conftest import PLAIN, QUICK
from tests.probe.torchrun.trouble import below

PROBES = 200
SETTLED = 10
"""Probes before growth counts: caches fill, modules that are imported late come in."""
MOST = 0.05
SMALL = ("model.config.num_hidden_layers=1", "model.config.hidden_size=32", "model.config.intermediate_size=64")


@dataclass(frozen=True, slots=True)
class Held:
    """What the three long-lived processes hold after a probe.

    Attributes:
        memory: process → resident anonymous memory, bytes: files' pages come and go with what others map.
        files: process → open file descriptors.
        zombies: dead children that nobody has reaped.
    """

    memory: dict[str, int]
    files: dict[str, int]
    zombies: int


def held() -> Held:
    """What is held now."""
    processes = {
        "controller": psutil.Process(),
        "host": below("probe.torchrun.host"),
        "fork server": below("multiprocessing.forkserver"),
    }
    children = psutil.Process().children(recursive=True)
    return Held(
        memory={name: anonymous_bytes(process.pid) for name, process in processes.items()},
        files={name: process.num_fds() for name, process in processes.items()},
        zombies=sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
    )


def anonymous_bytes(pid: int) -> int:
    """Anonymous of /proc/PID/smaps_rollup."""
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def soak(probes: int) -> list[Held]:
    """Probe a plain candidate so many times and look after each; the ranks' own memory goes with them."""
    settings = compose_settings([*QUICK, *SMALL])
    prober = TorchrunProber(settings, make_launcher(settings))
    looks = []
    try:
        for _ in range(probes):
            measured = prober.probe(ProbeRequest(PLAIN, 1))
            assert measured.outcome is Outcome.OK, measured.message
            looks.append(held())
    finally:
        prober.close()
    return looks


def growth(looks: list[Held], name: str) -> float:
    """By which share a process's memory grew between the settled and the last probe."""
    return looks[-1].memory[name] / looks[min(SETTLED, len(looks) - 1)].memory[name] - 1


def main() -> None:
    """Print what grew; end with exit code 1 where something did by more than it may."""
    looks = soak(PROBES)
    first, last = looks[SETTLED], looks[-1]
    bad = last.zombies > 0
    for name in first.memory:
        grown = growth(looks, name)
        bad = bad or grown > MOST or last.files[name] > first.files[name]
        print(
            f"{name:12} {first.memory[name] / 2**20:8.1f} MiB after probe {SETTLED + 1}, "
            f"{last.memory[name] / 2**20:8.1f} MiB after {len(looks)} ({grown:+.1%}); "
            f"{first.files[name]} file descriptors, then {last.files[name]}"
        )
    print(f"zombies: {last.zombies}")
    if bad:
        sys.exit(1)
