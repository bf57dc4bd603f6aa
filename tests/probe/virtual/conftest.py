"""One tracing process and one cache serve the tests of the virtual prober."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement
from autotune.probe.prober import ProbeRequest
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.job import Job
from autotune.probe.virtual.prober import VirtualProber
from autotune.settings import compose_settings

SMALL = (
    "model=gpt_tiny",
    "machine=a100_80g",
    "machine.devices_per_node=1",
    "model.config.num_hidden_layers=2",
    "workload.seq_len=64",
    "workload.global_batch=null",
)
"""A model that is traced in a fraction of a second."""

MakeProber = Callable[..., VirtualProber]


class CountingTracer(Tracer):
    """Counts what it traces."""

    def __init__(self) -> None:
        super().__init__(Machine(accelerator="cuda"), lambda text: None)
        self.runs = 0

    def run(self, jobs: Sequence[Job], on_done: Callable[[int], None] = lambda index: None) -> None:
        self.runs += sum(len(job.runs) for job in jobs)
        super().run(jobs, on_done)


@pytest.fixture(scope="session")
def tracer() -> Iterator[CountingTracer]:
    shared = CountingTracer()
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def prober(tracer: CountingTracer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProber:
    """Makes probers of a small model, under some overrides; `tracer=` replaces the shared one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def make(*overrides: str, base: Sequence[str] = SMALL, **more: Any) -> VirtualProber:
        return VirtualProber(compose_settings([*base, *overrides]), **{"tracer": tracer, **more})

    return make


def probe(prober: VirtualProber, candidate: Candidate) -> Measurement:
    return prober.probe(ProbeRequest(candidate, steps=1))
