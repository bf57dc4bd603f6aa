"""From what is left of a probe to one outcome, whatever is missing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.measurement import Outcome
from autotune.probe.torchrun.spec import CANNOT_WRITE, Beat, Pulse, RankResult
from autotune.probe.torchrun.verdict import Evidence, judge, memory_by_phase, worst
from autotune.process import Identity
from autotune.workload.phase import Phase

FAILURES = ["oom_device", "oom_host", "invalid", "diverged", "crashed", "infra"]
results = st.none() | st.builds(
    RankResult,
    rank=st.just(0),
    failure=st.none() | st.sampled_from(FAILURES),
    phase=st.none() | st.sampled_from([str(phase) for phase in Phase]),
    peer_lost=st.booleans(),
    stopped=st.booleans(),
    at=st.floats(0, 10),
)
processes = st.builds(Identity, pid=st.integers(1), started=st.integers(1))
beats = st.none() | st.builds(Beat, processes, st.sampled_from(Phase), progress=st.integers(0, 9))


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
        stopped=draw(st.lists(st.integers(0, world - 1), unique=True)),
        torn=draw(st.lists(st.integers(0, world - 1), unique=True)),
        full=draw(st.none() | st.just("/dev/shm")),
    )


def beat(phase: Phase, progress: int) -> Beat:
    return Beat(Identity(1, 1), phase, progress)


def evidence(*ranks: RankResult | None, **known: object) -> Evidence:
    started = [beat(Phase.FORWARD, 5) for _ in ranks]
    nothing = {"exit_codes": {}, "timed_out": False, "vanished": None, "agent_error": None, "kernel_killed": False}
    return Evidence(list(ranks), **{"beats": started, **nothing, **known})  # type: ignore[arg-type]


@given(evidences())
def test_every_combination_has_a_verdict(found: Evidence) -> None:
    verdict = judge(found)
    assert verdict.outcome in Outcome
    good = verdict.outcome in (Outcome.OK, Outcome.STOPPED)
    assert good == all(r is not None and r.failure is None for r in found.results)
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
    came = [beat(Phase.BACKWARD, 7), beat(Phase.FORWARD, 6)]
    verdict = judge(evidence(None, None, beats=came, timed_out=True))
    assert (verdict.outcome, verdict.rank, verdict.phase) == (Outcome.TIMEOUT, 1, Phase.FORWARD)


def test_ranks_that_came_equally_far_are_all_named_unless_a_signal_has_stopped_one() -> None:
    came = [beat(Phase.STEP, 7), beat(Phase.STEP, 7)]
    assert "ranks 0, 1 were not done" in str(judge(evidence(None, None, beats=came, timed_out=True)).message)
    assert judge(evidence(None, None, beats=came, timed_out=True, stopped=[1])).rank == 1


def test_a_rank_that_ends_before_it_has_begun_is_our_trouble() -> None:
    verdict = judge(evidence(None, None, beats=[None, None], exit_codes={0: 1}))
    assert verdict.outcome is Outcome.INFRA
    assert verdict.message == "rank 0 exited with code 1 before it had begun"


@pytest.mark.parametrize("code", [-signal.SIGBUS, -signal.SIGSEGV])
def test_a_rank_that_touches_memory_which_a_full_place_cannot_give_is_our_trouble(code: int) -> None:
    assert judge(evidence(None, None, exit_codes={1: code})).outcome is Outcome.CRASHED
    full = judge(evidence(None, None, exit_codes={1: code}, full="/dev/shm"))
    assert full.outcome is Outcome.INFRA
    assert str(full.message).endswith("/dev/shm is full")


def test_a_result_that_is_not_whole_or_could_not_be_written_is_our_trouble() -> None:
    assert judge(evidence(None, None, torn=[1], exit_codes={0: 1})).outcome is Outcome.INFRA
    assert judge(evidence(None, None, exit_codes={1: CANNOT_WRITE})).outcome is Outcome.INFRA


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
            assert RankResult.torn(tmp_path, 3)
        assert RankResult.read(tmp_path, 4) is None
        assert not RankResult.torn(tmp_path, 4)

    def test_a_pulse_is_read_from_outside_as_it_beats(self, tmp_path: Path) -> None:
        assert Pulse.read(tmp_path, 0) is None
        pulse = Pulse(tmp_path, 0)
        pulse.phase(Phase.INIT)
        pulse.phase(Phase.FORWARD)
        assert Pulse.read(tmp_path, 0) == Beat(Identity.here(), Phase.FORWARD, 2)


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
