"""Two-node probes over a real ssh on the loopback, and what is said of hosts that cannot be reached or are lost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import InfraError
from autotune.probe.measurement import Outcome
from tests.commands import marked, wait_for
from tests.slurm import free_ports
from tests.sshd import Sshd, running_sshd
from tests.test_tune import is_rank

from .conftest import Nodes, two_nodes

pytestmark = pytest.mark.probes


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """An sshd that stands for two hosts."""
    with running_sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def over(sshd: Sshd, folder: Path, options: str = "", *overrides: str) -> Nodes:
    """A launcher of both hosts, with more options for ssh before those that know the hosts."""
    (folder / "hostfile").write_text("first slots=1\nsecond slots=1\n")
    ssh = f"launcher.ssh_options='{options} -F {sshd.config}'"
    return two_nodes("launcher=hosts", f"launcher.hostfile={folder}/hostfile", ssh, *overrides)


def test_a_probe_over_two_hosts_runs_and_one_that_loses_a_host_is_our_trouble(sshd: Sshd, tmp_path: Path) -> None:
    nodes = over(sshd, tmp_path, "", "probe.deadline_s=100")
    measured = nodes.probe()
    assert measured.outcome is Outcome.OK, measured
    assert {m["rank"] for m in measured.memory["forward"]} == {0, 1}
    assert marked(sshd.mark) == []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(nodes.probe, steps=100_000)
        wait_for(lambda: sum(map(is_rank, marked(sshd.mark))) == 2)
        began = time.monotonic()
        sshd.connections()[1].kill()
        lost = running.result(60)
    assert lost.outcome is Outcome.INFRA, lost
    assert "was lost: the connection was lost" in (lost.message or "")
    assert time.monotonic() - began < 30
    wait_for(lambda: not marked(sshd.mark), 5)


def refusal(nodes: Nodes, folder: Path) -> InfraError:
    """What a launcher says that cannot start its node programs."""
    (folder / "spec.json").write_text("{}")
    with pytest.raises(InfraError) as refused:
        nodes.launcher.run(folder / "spec.json", 2, 10.0)
    return refused.value


def test_a_host_that_does_not_know_the_key_is_named_and_nobody_is_asked_for_a_password(
    sshd: Sshd, tmp_path: Path
) -> None:
    stranger = replace(sshd, config=tmp_path / "ssh_config")
    stranger.config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/key", f"{sshd.folder}/other_key"))
    error = refusal(over(stranger, tmp_path), tmp_path)
    assert re.match(r"host (first|second) cannot be reached: .*Permission denied", error.message)
    assert "BatchMode=yes" in error.hint


def test_a_host_that_does_not_answer_is_named(sshd: Sshd, tmp_path: Path) -> None:
    error = refusal(over(sshd, tmp_path, f"-p {free_ports(1)[0]}"), tmp_path)
    assert re.match(r"host (first|second) cannot be reached: .*Connection refused", error.message)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nonexistent/python", r"host (first|second) has no /nonexistent/python"),
        ("/bin/false", r"the node program did not start on host (first|second) \(exit code 1\)"),
    ],
)
def test_a_host_without_this_python_or_without_autotune_is_named(
    sshd: Sshd, tmp_path: Path, python: str, message: str
) -> None:
    error = refusal(over(sshd, tmp_path, "", f"launcher.python={python}"), tmp_path)
    assert re.match(message, error.message)
    assert "launcher.python" in error.hint
