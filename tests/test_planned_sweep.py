"""A plan and a check with DeepSpeed's own engine on virtual devices, from the command line, with no stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Run, autotune, python
from tests.test_tune import AND_TELL, MODEL, PLAIN

pytestmark = pytest.mark.probes
SPACE = (*PLAIN, "space.micro_batch=[1,8]", "space.zero_stage=[1,3]")
ELSEWHERE = ("machine=a100_40g", "machine.devices_per_node=2", *MODEL[1:], *SPACE)
STUDY = "gpt_tiny-a100_40g-1x2"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("planned")
    return folder, python(folder, AND_TELL, *ELSEWHERE).finish()


def test_a_machine_that_is_not_here_is_planned_for(planned: tuple[Path, Run]) -> None:
    folder, run = planned
    assert run.code == 0, run.err
    assert run.err.startswith("planning for a100_40g (1 × 2 devices) because ")
    assert run.err.splitlines()[-1] == "loaded:"
    assert run.left == []
    assert run.out.startswith("PLANNED, NOT MEASURED")
    assert "4 candidates looked at: 4 fit, 0 are at risk, 0 do not fit" in run.out
    recipe = json.loads((folder / "studies" / STUDY / "recipe.json").read_text())
    assert recipe["status"] == "planned, not measured"


def test_every_candidate_has_its_memory(planned: tuple[Path, Run]) -> None:
    folder, _ = planned
    rows = json.loads(autotune(folder, "trials", STUDY, "--format", "json").finish().out)
    assert len(rows) == 4
    for row in rows:
        assert (row["outcome"], row["probe_kind"]) == ("ok", "virtual")
        assert 0 < row["peak_allocated_bytes"] <= row["peak_reserved_bytes"] <= row["device_total_bytes"]
    by_batch = {(row["candidate"]["zero_stage"], row["candidate"]["micro_batch"]): row for row in rows}
    for stage in (1, 3):
        assert by_batch[stage, 1]["peak_allocated_bytes"] < by_batch[stage, 8]["peak_allocated_bytes"]


def test_the_same_plan_predicts_nothing_twice(planned: tuple[Path, Run]) -> None:
    folder, first = planned
    again = autotune(folder, *ELSEWHERE).finish()
    assert "4 candidates, 4 of them tried already" in again.err
    assert again.out == first.out


def test_check_predicts_the_config_that_was_planned(planned: tuple[Path, Run]) -> None:
    folder, _ = planned
    config = folder / "studies" / STUDY / "deepspeed_config.json"
    recipe = json.loads((folder / "studies" / STUDY / "recipe.json").read_text())
    run = autotune(folder, "check", str(config), "--format", "json", "model=gpt_tiny", *ELSEWHERE).finish()
    assert run.code == 0, run.err
    prediction = json.loads(run.out)["prediction"]
    assert prediction["verdict"] == "fits"
    assert prediction["peak_allocated"] == recipe["measurement"]["peak_allocated_bytes"]
