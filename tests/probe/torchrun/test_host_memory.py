"""Host memory: what a node's ranks hold is known, and a probe ends before the kernel would end something else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.machine.machine import GIB
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.torchrun import host_memory
from autotune.probe.torchrun.host_memory import HostMemory, held_by_nodes
from autotune.probe.torchrun.procfs import available_bytes, pss_bytes, resident_bytes
from autotune.workload.phase import Phase

from .conftest import PLAIN, Probe

pytestmark = pytest.mark.probes

MB = 1_000_000
EATER = """
import sys, time

for line in sys.stdin:
    kept = globals().setdefault("kept", [])
    kept.append(b"x" * int(line))
    print("done", flush=True)
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


class Eater:
    """A process that takes memory when it is told to."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.eat(0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def eat(self, size: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def eater() -> Iterator[Callable[..., Eater]]:
    eaters: list[Eater] = []

    def make(*command: str) -> Eater:
        eaters.append(Eater(*command))
        return eaters[-1]

    yield make
    for one in eaters:
        one.process.communicate()


def host_of(*eaters: Eater, left: int) -> Callable[[], int]:
    """A host with so much memory left, of which only these processes take more."""
    before = sum(resident_bytes(eater.pid) for eater in eaters)
    return lambda: left - sum(resident_bytes(eater.pid) for eater in eaters) + before


class TestWatching:
    def test_counts_every_rank_and_its_children_and_shared_pages_once(
        self, eater: Callable[..., Eater], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_memory, "FAMILY_S", 0.0)
        alone, parent = eater(EATER), eater(PARENT, EATER)  # the child of the second is the one that takes
        memory = HostMemory(0, 0)
        ranks = {0: alone.pid, 1: parent.pid}
        assert not memory.look(ranks)
        before = memory.peak_bytes
        assert pss_bytes(alone.pid) <= before < 3 * resident_bytes(alone.pid)
        alone.eat(100 * MB)
        parent.eat(50 * MB)
        memory = HostMemory(0, 0)
        assert not memory.look(ranks)
        assert memory.peak_bytes - before == pytest.approx(150 * MB, rel=0.02)

    def test_reads_what_is_dear_only_where_memory_has_grown(
        self, eater: Callable[..., Eater], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = eater(EATER)
        asked: list[int] = []
        monkeypatch.setattr(host_memory, "pss_bytes", lambda pid: asked.append(pid) or pss_bytes(pid))
        monkeypatch.setattr(host_memory, "SHARE", 0)
        memory = HostMemory(0, 0)
        for _ in range(5):
            memory.look({0: one.pid})
        assert len(asked) == 1
        one.eat(20 * MB)
        memory.look({0: one.pid})
        assert len(asked) == 2


class TestGuard:
    def test_ends_a_probe_that_takes_the_hosts_memory_and_names_the_rank(self, eater: Callable[..., Eater]) -> None:
        small, large = eater(EATER), eater(EATER)
        memory = HostMemory(0, 500 * MB, host_of(small, large, left=800 * MB))
        ranks = {0: small.pid, 1: large.pid}
        assert not memory.look(ranks)
        large.eat(200 * MB)
        assert not memory.look(ranks)
        small.eat(20 * MB)
        large.eat(100 * MB)
        assert memory.look(ranks)
        assert memory.full is not None
        assert memory.full.ours
        assert memory.full.rank == 1
        assert "rank 1 grew by" in memory.full.message
        assert memory.full.needed_bytes is not None
        assert memory.full.needed_bytes > 320 * MB

    def test_does_not_blame_a_small_probe_for_what_a_neighbour_takes(self, eater: Callable[..., Eater]) -> None:
        rank, neighbour = eater(EATER), eater(EATER)
        memory = HostMemory(0, 500 * MB, host_of(rank, neighbour, left=800 * MB))
        rank.eat(50 * MB)
        assert not memory.look({0: rank.pid})
        neighbour.eat(300 * MB)
        assert memory.look({0: rank.pid})
        assert memory.full is not None
        assert not memory.full.ours
        assert "full with someone else's work" in memory.full.message

    def test_a_rank_that_begins_after_the_first_look_is_no_neighbour(self, eater: Callable[..., Eater]) -> None:
        early, late = eater(EATER), eater(EATER)
        memory = HostMemory(0, 500 * MB, host_of(early, late, left=800 * MB))
        assert not memory.look({0: early.pid})
        assert not memory.look({0: early.pid, 1: late.pid})
        late.eat(320 * MB)
        assert memory.look({0: early.pid, 1: late.pid})
        assert memory.full is not None
        assert memory.full.ours
        assert memory.full.rank == 1

    def test_of_a_host_that_was_full_before_blames_nobody_here(self, eater: Callable[..., Eater]) -> None:
        memory = HostMemory(0, 500 * MB, lambda: 400 * MB)
        assert memory.look({0: eater(EATER).pid})
        assert memory.full is not None
        assert not memory.full.ours

    def test_holds_a_node_to_the_memory_that_the_settings_give_it(self, eater: Callable[..., Eater]) -> None:
        one = eater(EATER)
        memory = HostMemory(100 * MB, 0)
        assert not memory.look({0: one.pid})
        one.eat(120 * MB)
        deadline = time.monotonic() + 5
        while not memory.look({0: one.pid}) and time.monotonic() < deadline:  # it counts only now and then
            time.sleep(0.02)
        assert memory.full is not None
        assert memory.full is not None
        assert memory.full.ours
        assert "machine.host_memory_gib" in memory.full.message


class TestProbes:
    @pytest.mark.parametrize("limit", ["machine.host_memory_gib=1.2", "probe.host_reserve_gib={left}"])
    def test_that_take_the_hosts_memory_end_as_its_oom_in_time(
        self, faulty: Callable[..., Measurement], probe: Probe, limit: str
    ) -> None:
        setting = limit.format(left=available_bytes() / GIB - 1.0)
        measured = faulty("eat", PLAIN, setting)
        assert measured.outcome is Outcome.OOM_HOST, measured
        assert measured.wall_s < 15
        assert measured.phase is Phase.FORWARD
        assert measured.detail["rank"] == 1
        assert measured.needed_bytes
        assert measured.host_peak_bytes is not None
        assert 0.3 * GIB < measured.host_peak_bytes < 8 * GIB
        good = probe(PLAIN)
        assert good.outcome is Outcome.OK
        assert good.host_peak_bytes is not None
        assert 0.1 * GIB < good.host_peak_bytes < 1.2 * GIB

    def test_ranks_are_what_the_kernel_ends_first(self, faulty: Callable[..., Measurement]) -> None:
        assert "oom_score_adj is 1000" in (faulty("adjusted").message or "")


class TestAvailable:
    def test_is_the_least_of_the_host_and_of_every_control_group(self, tmp_path: Path) -> None:
        def write(name: str, text: str) -> None:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        write("proc/meminfo", "MemTotal: 99 kB\nMemAvailable:    9000 kB\n")
        assert available_bytes(tmp_path) == 9000 * 1024
        write("proc/self/cgroup", "0::/outer/inner\n")
        write("sys/fs/cgroup/outer/memory.max", "5000000\n")
        write("sys/fs/cgroup/outer/memory.current", "3000000\n")
        write("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 500000\n")
        write("sys/fs/cgroup/outer/inner/memory.max", "max\n")
        assert available_bytes(tmp_path) == 2_500_000
        write("proc/self/cgroup", "4:memory:/job\n0::/\n")
        write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4000000\n")
        write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "3900000\n")
        write("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 100000\n")
        assert available_bytes(tmp_path) == 200_000


def test_each_nodes_ranks_are_added_up_and_the_pinned_bytes_with_them() -> None:
    def meters(*ranks: tuple[int, int, int]) -> list[dict[str, Any]]:
        return [{"rank": rank, "pss": pss, "pinned": pinned} for rank, pss, pinned in ranks]

    memory = {
        "init": meters((0, 10, 0), (1, 10, 0), (2, 30, 0), (3, 30, 0)),
        "step": meters((0, 20, 5), (1, 20, 5), (2, 20, 0), (3, 20, 0)),
    }
    assert held_by_nodes(memory, 2, 2, [0, 0]) == [50, 60]
    assert held_by_nodes(memory, 2, 2, [70, 10]) == [80, 60]
    assert held_by_nodes({}, 1, 2, [7]) == [7]
