"""A hostfile is what DeepSpeed's launcher takes; what it cannot mean is refused with the number of the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import SettingsError
from autotune.probe.torchrun.remote.hosts import Host, read_hostfile
from autotune.probe.torchrun.remote.reach import check_reach
from autotune.settings import compose_settings


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("# the cluster\n\nworker-1 slots=8\nworker-2  slots = 8  # the noisy one\n")
    return path


def test_hosts_comments_and_empty_lines_are_understood(hostfile: Path) -> None:
    assert read_hostfile(hostfile) == [Host("worker-1", 8), Host("worker-2", 8)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-1 slots=8\nworker-2\n", "line 2: 'worker-2' is no host"),
        ("worker-1 slots=0\n", "line 1: 'worker-1 slots=0' is no host"),
        ("worker-1 slots=8\n\nworker-1 slots=8\n", "line 3: worker-1 is there already"),
        ("worker-1 slots=8\nworker-2 slots=4\n", "line 2: worker-2 has 4 slots, and worker-1 has 8"),
        ("# nobody\n", "names no host"),
    ],
)
def test_what_means_nothing_is_refused_with_its_line(hostfile: Path, text: str, message: str) -> None:
    hostfile.write_text(text)
    with pytest.raises(SettingsError, match="hostfile") as refused:
        read_hostfile(hostfile)
    assert message in refused.value.message
    assert refused.value.hint


def test_the_machine_has_the_hosts_of_the_hostfile(hostfile: Path) -> None:
    shape = ["machine=cpu", "launcher=hosts", "machine.devices_per_node=8"]
    check_reach(compose_settings([*shape, f"launcher.hostfile={hostfile}", "machine.nodes=2"]))
    with pytest.raises(SettingsError, match=r"2 hosts of 8 slots, and machine=cpu has 3 nodes of 8 devices"):
        check_reach(compose_settings([*shape, f"launcher.hostfile={hostfile}", "machine.nodes=3"]))
    with pytest.raises(SettingsError, match="needs a hostfile"):
        check_reach(compose_settings(shape))
    with pytest.raises(SettingsError, match="cannot be read"):
        check_reach(compose_settings([*shape, f"launcher.hostfile={hostfile}.gone"]))
