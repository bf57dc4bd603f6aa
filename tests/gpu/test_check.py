"""The check that a GPU gets, on the processor here: the same steps, with two candidates of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.machine import detect
from autotune.probe.measurement import Measurement, Outcome
from autotune.settings import compose_settings
from autotune.space.space import Space
from tests.gpu import check
from tests.gpu.check import CASES, TOO_LARGE, Case, Plan, launching, main, run

TINY = """
    model=gpt_tiny model.config.num_hidden_layers=3 machine=cpu machine.devices_per_node=1
    machine.device_memory_gib=0.09 workload.seq_len=64 workload.global_batch=null
    space.reduce_bucket_size=2000000 space.allgather_bucket_size=2000000
    probe.warmup_steps=1 probe.steps=1
"""


def tiny() -> Plan:
    settings = compose_settings(TINY.split())
    space = Space(settings)
    cases = (Case(1, "all", 2, 1), Case(3, "none", 2, 2))  # not both: gloo makes a copy when backward is at its peak
    return Plan(settings, [case.candidate(space) for case in cases], Case(0, "none", 64, 1).candidate(space))


@pytest.mark.probes
def test_on_a_processor_with_one_rank_everything_is_as_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "report" / "found.json"
    code = run([tiny()], lambda: 0, path)
    out = capsys.readouterr().out
    assert code == 0, out
    written = json.loads(path.read_text())
    assert [pair["outcome"] for pair in written["pairs"]] == [
        {"predicted": outcome, "measured": outcome} for outcome in ("ok", "ok", "oom_device")
    ]
    errors = [figure["error"] for pair in written["pairs"][:2] for figure in pair["figures"]["allocated"].values()]
    assert len(errors) == 10
    assert max(map(abs, errors)) < 0.01
    assert [found["passed"] for found in written["checks"]] == [True] * 4
    assert out.count("WRONG") == 0


def test_without_a_gpu_it_says_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detect, "nvml_gpus", lambda: ())
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("no NVIDIA device is visible here: ")


def test_probes_that_no_time_is_left_for_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nothing:
        name = "none"

        def describe(self, directory: Path) -> None:
            """Nothing is known of the model."""

        def run(self, spec_path: Path, world: int, deadline_s: float) -> dict[str, object]:
            seen = {"timed_out": False, "stopped": [], "vanished": None, "hosts": [{"peak_bytes": 0, "full": None}]}
            return {"exit_codes": {}, "error": "nothing runs", **seen}

        def close(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr(check, "LIMIT_S", -1.0)
    monkeypatch.setattr(check, "predict", lambda settings, candidates: dict.fromkeys(candidates, oom()))
    monkeypatch.setattr(check, "make_launcher", lambda settings, tell: Nothing())
    assert run([tiny()], lambda: 0, tmp_path / "found.json") == 1
    out = capsys.readouterr().out
    assert out.count("left out, no time: 1 ranks") == 2
    assert "what is far too large ends as infra" in out


def oom() -> Measurement:
    return Measurement(Outcome.OOM_DEVICE, "virtual")


def probed(overhead_s: float, initialised_s: float) -> Measurement:
    return Measurement(
        Outcome.OK, "torchrun", overhead_s=overhead_s, detail={"timeline_s": {"initialised": initialised_s}}
    )


def test_a_launcher_is_warm_when_from_the_second_probe_on_ranks_start_at_once() -> None:
    assert launching([probed(60, 5), probed(7, 6), probed(8, 7)]).passed
    assert not launching([probed(7, 6), probed(30, 6), probed(31, 6)]).passed
    assert not launching([probed(7, 6), oom()]).passed


def test_the_candidates_of_the_gpu_are_twelve_of_all_stages() -> None:
    settings = compose_settings([*check.MODEL.split(), "machine=h100_80g", "machine.devices_per_node=1"])
    space = Space(settings)
    candidates = [case.candidate(space) for case in (*CASES, TOO_LARGE)]
    assert len(set(candidates)) == 13
    assert {c.zero_stage for c in candidates} == {0, 1, 2, 3}
    assert {c.checkpoint_blocks for c in candidates} == {"none", "half", "all"}
    assert {c.micro_batch for c in candidates[:-1]} == {1, 2, 4}
    assert {c.accumulation for c in candidates} == {1, 2}
    assert sum(c.offload_optimizer == "cpu" for c in candidates) == 3
