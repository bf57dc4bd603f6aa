"""What Slurm's records and limits mean, and what is said where there is no Slurm."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from autotune.errors import InfraError
from autotune.probe.torchrun.remote.allocation import fields
from autotune.probe.torchrun.remote.reach import check_reach
from autotune.probe.torchrun.remote.slurm import seconds
from autotune.settings import compose_settings

SLURM = ["machine=cpu", "launcher=slurm", "machine.nodes=2"]


@pytest.mark.parametrize(
    ("limit", "length"),
    [("00:01:00", 60), ("1-02:03:04", 93784), ("10:00", 600), ("UNLIMITED", math.inf), ("Partition_Limit", math.inf)],
)
def test_a_time_limit_is_read_as_slurm_writes_it(limit: str, length: float) -> None:
    assert seconds(limit) == length


def test_a_record_is_read_field_by_field() -> None:
    record = fields("StepId=1.0 TimeLimit=00:01:00 TRES=cpu=2,mem=8000M,node=2 Command=(null)\n")
    assert (record["TimeLimit"], record["TRES"]) == ("00:01:00", "cpu=2,mem=8000M,node=2")


def test_where_there_is_no_slurm_it_is_said_before_a_study_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InfraError, match="there is no sinfo here") as refused:
        check_reach(compose_settings(SLURM))
    assert "launcher=hosts" in refused.value.hint


def test_a_slurm_that_does_not_answer_is_our_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "sinfo"
    failing.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InfraError, match=r"sinfo failed \(exit code 1\): Unable to contact"):
        check_reach(compose_settings(SLURM))
