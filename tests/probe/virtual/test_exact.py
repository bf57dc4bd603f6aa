"""Real ranks under gloo and virtual ones do the same: operation for operation, allocation for allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.probe.torchrun.launcher import environment
from autotune.settings import compose_settings
from tests.probe.torchrun.conftest import CHECKPOINTED, PLAIN, STAGES

PROGRAM = Path(__file__).with_name("both.py")
PHASES = ["load", "init", "first_step", "forward", "backward", "step"]
TO_HOST = CHECKPOINTED | {"checkpoint_input": "cpu"}
OFFLOADED: dict[str, dict[str, Any]] = {
    "stage 1, optimizer on the host": STAGES[1] | {"offload_optimizer": "cpu"},
    "stage 2, optimizer on the host": STAGES[2] | {"offload_optimizer": "cpu"},
    "stage 3, optimizer on the host": STAGES[3] | {"offload_optimizer": "cpu"},
    "stage 3, parameters on the host": STAGES[3] | {"offload_param": "cpu"},
    "stage 3, both on the host": STAGES[3] | {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "stage 3, both and inputs on the host": STAGES[3] | {"offload_optimizer": "cpu", "offload_param": "cpu"} | TO_HOST,
}


def cases() -> Iterator[dict[str, Any]]:
    """gpt_tiny in stages 0 to 3 × no/all checkpointing × accumulation 1 and 2 × fp32 and bf16, and with offloading."""
    for stage, knobs in STAGES.items():
        for recomputed in ({}, CHECKPOINTED):
            for accumulation in (1, 2):
                for precision in ("fp32", "bf16"):
                    name = f"stage {stage}, {'all' if recomputed else 'none'} recomputed, ×{accumulation}, {precision}"
                    yield case(name, knobs | recomputed, accumulation, precision)
    for name, knobs in OFFLOADED.items():
        for accumulation in (1, 2):
            yield case(f"{name}, ×{accumulation}", knobs, accumulation, "bf16")


def case(name: str, knobs: dict[str, Any], accumulation: int, precision: str) -> dict[str, Any]:
    candidate = PLAIN.replace(**knobs, accumulation=accumulation, precision=precision)
    overrides = [
        f"workload.precision={precision}",
        "workload.seq_len=32",
        f"workload.global_batch={4 * accumulation}",
    ]
    return {"name": name, "overrides": overrides, "candidate": candidate.to_dict()}


CASES = list(cases())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case run for real and virtually, by a process that forks all of them."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "cases.json").write_text(json.dumps(CASES))
    settings = compose_settings(["model=gpt_tiny", "machine=cpu"])
    subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("both.py")),
            str(folder / "cases.json"),
            str(folder / "out.json"),
        ],
        env=environment(settings.machine, settings.workload, 1),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return {result["name"]: result for result in json.loads((folder / "out.json").read_text())}


@pytest.mark.parametrize("name", [c["name"] for c in CASES])
def test_virtual_ranks_do_what_real_ones_do(compared: dict[str, dict[str, Any]], name: str) -> None:
    result = compared[name]
    assert "failed" not in result
    for rank in result["ranks"]:
        assert rank["differs_at"] is None, rank["around"]
        assert rank["events"] > 2000
        assert list(rank["real"]) == PHASES
        assert rank["virtual"] == rank["real"]  # peak and live bytes of every phase
