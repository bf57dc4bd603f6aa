"""From what is left of a probe to one outcome, whatever is missing."""

from __future__ import annotations

import signal
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.measurement import Outcome
from autotune.probe.torchrun.spec import Beat, Pulse, RankResult
from autotune.probe.torchrun.verdict import Evidence, judge, memory_by_phase, worst
from autotune.workload.phase import Phase

FAILURES = ["oom_device", "oom_host", "invalid", "diverged", "crashed"]
results = st.none() | st.builds(
    RankResult,
    rank=st.just(0),
    failure=st.none() | st.sampled_from(FAILURES),
    phase=st.none() | st.sampled_from([str(phase) for phase in Phase]),
    peer_lost=st.booleans(),
    stopped=st.booleans(),
    at=st.floats(0, 10),
)
beats = st.none() | st.builds(
    Beat, pid=st.integers(1), create_time=st.floats(1, 2), phase=st.sampled_from(Phase), progress=st.integers(0, 9)
)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    world = draw(st.integers(1, 4))
    ranks = [draw(results) for _ in range(world)]
    for rank, result in enumerate(ranks):
        if result is not None:
            result.rank = rank
    codes = st.integers(-15, 255).filter(lambda code: code != 0)
    return Evidence(
        results=ranks,
        beats=[draw(beats) for _ in range(world)],
        exit_codes=draw(st.dictionaries(st.integers(0, world - 1), codes)),
        timed_out=draw(st.booleans()),
        vanished=draw(st.none() | st.integers(0, world - 1)),
        agent_error=draw(st.none() | st.just("rendezvous failed")),
        kernel_killed=draw(st.booleans()),
    )


def evidence(*ranks: RankResult | None, **known: object) -> Evidence:
    started = [Beat(1, 1.0, Phase.FORWARD, 5) for _ in ranks]
    nothing = {"exit_codes": {}, "timed_out": False, "vanished": None, "agent_error": None, "kernel_killed": False}
    return Evidence(list(ranks), **{"beats": started, **nothing, **known})  # type: ignore[arg-type]


@given(evidences())
def test_every_combination_has_a_verdict(found: Evidence) -> None:
    verdict = judge(found)
    assert verdict.outcome in Outcome
    good = verdict.outcome in (Outcome.OK, Outcome.STOPPED)
    assert good == (not found.timed_out and all(r is not None and r.failure is None for r in found.results))
    assert good or verdict.message is not None or any(r and r.failure for r in found.results)


@given(evidences())
def test_an_oom_that_a_rank_told_is_never_hidden_by_what_its_peers_saw(found: Evidence) -> None:
    told = [r for r in found.results if r is not None and not r.peer_lost and (r.failure or "").startswith("oom")]
    if told:
        assert judge(found).outcome.is_oom


def test_a_rank_that_saw_its_peer_go_is_not_the_cause() -> None:
    seen = RankResult(0, failure="crashed", peer_lost=True, message="Connection closed by peer")
    verdict = judge(evidence(seen, None, exit_codes={0: 1, 1: -signal.SIGKILL}))
    assert (verdict.outcome, verdict.rank) == (Outcome.CRASHED, 1)
    assert "killed by SIGKILL" in (verdict.message or "")


def test_a_rank_killed_by_the_kernel_is_the_hosts_oom() -> None:
    verdict = judge(evidence(None, None, exit_codes={1: -signal.SIGKILL}, kernel_killed=True))
    assert verdict.outcome is Outcome.OOM_HOST


def test_the_rank_that_came_least_far_is_the_one_that_hangs() -> None:
    came = [Beat(1, 1.0, Phase.BACKWARD, 7), Beat(2, 1.0, Phase.FORWARD, 6)]
    verdict = judge(evidence(None, None, beats=came, timed_out=True))
    assert (verdict.outcome, verdict.rank, verdict.phase) == (Outcome.TIMEOUT, 1, Phase.FORWARD)


def test_a_launcher_that_failed_is_our_trouble() -> None:
    verdict = judge(evidence(None, None, beats=[None, None], agent_error="port taken"))
    assert (verdict.outcome, verdict.message) == (Outcome.INFRA, "port taken")


class TestFiles:
    def test_a_truncated_or_foreign_result_is_none_at_all(self, tmp_path: Path) -> None:
        RankResult(3, failure="crashed", message="x").write(tmp_path)
        whole = (tmp_path / "rank3.json").read_text()
        assert RankResult.read(tmp_path, 3) == RankResult(3, failure="crashed", message="x")
        for damaged in (whole[:-20], "", "[]", "{}", '{"schema": 99}', whole.replace("failure", "failures")):
            (tmp_path / "rank3.json").write_text(damaged)
            assert RankResult.read(tmp_path, 3) is None
        assert RankResult.read(tmp_path, 4) is None

    def test_a_pulse_is_read_from_outside_as_it_beats(self, tmp_path: Path) -> None:
        assert Pulse.read(tmp_path, 0) is None
        pulse = Pulse(tmp_path, 0)
        pulse.start(12.5)
        pulse.phase(Phase.INIT)
        pulse.phase(Phase.FORWARD)
        beat = Pulse.read(tmp_path, 0)
        assert beat is not None
        assert (beat.create_time, beat.phase, beat.progress) == (12.5, Phase.FORWARD, 2)


def test_the_worst_rank_of_any_phase_counts() -> None:
    memory = memory_by_phase(
        [
            RankResult(0, memory={"load": {"allocated": 5}, "step": {"allocated": 7}}),
            None,
            RankResult(2, memory={"load": {"allocated": 9}}),
        ]
    )
    assert worst(memory, "allocated") == (9, 2)
    assert worst(memory, "device_total") is None
