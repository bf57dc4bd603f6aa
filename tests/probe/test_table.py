"""The table prober is a prober like the others."""

from __future__ import annotations

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import Prober, ProbeRequest
from autotune.probe.table import TableProber

CANDIDATE = Candidate(micro_batch=1, accumulation=1, zero_stage=1, precision="bf16")
OK = Measurement(Outcome.OK, "table", tokens_per_s=100.0, tokens_per_s_low=95.0, tokens_per_s_high=105.0)


def test_a_mapping_is_looked_up_by_key() -> None:
    prober: Prober = TableProber({CANDIDATE.key: OK})
    assert prober.probe(ProbeRequest(CANDIDATE, steps=5)) == OK
    prober.close()


def test_a_function_is_asked() -> None:
    asked: list[Candidate] = []
    prober = TableProber(lambda candidate: asked.append(candidate) or OK)
    assert prober.probe(ProbeRequest(CANDIDATE, steps=5)) == OK
    assert asked == [CANDIDATE]
    assert prober.requests == [ProbeRequest(CANDIDATE, steps=5)]


def test_a_hole_in_the_table_is_our_trouble() -> None:
    hole = TableProber({}).probe(ProbeRequest(CANDIDATE, steps=5))
    assert hole.outcome is Outcome.INFRA
    assert CANDIDATE.key in str(hole.message)


def test_what_cannot_win_is_stopped_with_its_bound() -> None:
    prober = TableProber({CANDIDATE.key: OK})
    stopped = prober.probe(ProbeRequest(CANDIDATE, steps=5, stop_below_tokens_per_s=106.0))
    assert (stopped.outcome, stopped.tokens_per_s) == (Outcome.STOPPED, 105.0)
    assert prober.probe(ProbeRequest(CANDIDATE, steps=5, stop_below_tokens_per_s=104.0)) == OK


def test_a_confirmation_is_never_stopped() -> None:
    request = ProbeRequest(CANDIDATE, steps=15, confirmation=True, stop_below_tokens_per_s=1e9)
    assert TableProber({CANDIDATE.key: OK}).probe(request) == OK
