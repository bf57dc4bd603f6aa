"""Progress: one line per event where nobody watches, a live display on a terminal; the summary is for stdout."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.candidate import Candidate
from autotune.machine.machine import GIB, Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.report import terminal
from autotune.report.summary import print_summary
from autotune.report.terminal import LineProgress, LiveProgress, Progress, progress
from autotune.search.observer import Overview
from autotune.search.result import Counts, Result
from autotune.store.records import ProbeRecord
from autotune.workload.phase import Phase

MACHINE = Machine(name="a100_80g", device="NVIDIA A100-SXM4-80GB", device_memory_gib=80.0, devices_per_node=8)
PLAIN = Candidate(micro_batch=1, accumulation=64, zero_stage=1, precision="bf16")
BEST = Candidate(micro_batch=4, accumulation=16, zero_stage=2, precision="bf16")
OVERVIEW = Overview(
    study="s",
    sampler="tpe",
    candidates=64,
    tried=12,
    impossible={"ZeRO-3 states exceed the host": 4},
    budget=40,
    spent=0,
    knobs=("micro_batch", "zero_stage"),
    ledger="100 combinations\n-36 some-rule: why\n 64 candidates",
)
OOM = Measurement(
    Outcome.OOM_DEVICE,
    "torchrun",
    Phase.FORWARD,
    message="OutOfMemoryError: CUDA\nout of memory [GPU 0]",
    needed_bytes=310 * GIB,
    wall_s=9.0,
)


def record(candidate: Candidate, measurement: Measurement, trial: int = 1, **flags: bool) -> ProbeRecord:
    given = {"inferred": False, "reused": False, "confirmation": False} | flags
    return ProbeRecord(
        "s", trial, candidate.key, candidate, measurement, **given, optuna_study=None, optuna_number=None, created=""
    )


def a_sweep(watched: Progress, ok: Callable[..., Measurement]) -> None:
    watched.started(OVERVIEW)
    watched.probing(PLAIN, 1, 39)
    watched.finished(record(PLAIN, ok(30_000.0), 13))
    watched.probing(BEST, 2, 38)
    watched.again(record(BEST, Measurement(Outcome.INFRA, "torchrun", message="port taken"), 14), 2)
    watched.finished(record(BEST, ok(40_000.0), 15))
    watched.finished(record(BEST.replace(micro_batch=8), OOM, 16))
    watched.finished(record(BEST.replace(micro_batch=16), OOM, 17, inferred=True))
    watched.searched("every candidate is tried")
    watched.confirming(BEST, 1, 4)


def test_without_a_terminal_every_event_is_one_line(ok: Any) -> None:
    err = io.StringIO()
    with progress(err, MACHINE, None) as watched:
        assert isinstance(watched, LineProgress)
        a_sweep(watched, ok)
    lines = err.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d .", line) for line in lines)
    assert "\x1b" not in err.getvalue()
    text = [line[9:] for line in lines]
    assert text[:3] == OVERVIEW.ledger.splitlines()
    assert "4 candidates cannot run: ZeRO-3 states exceed the host" in text
    assert "s: 64 candidates, 12 of them tried already; sampler tpe, budget 40 probes" in text
    assert f"probe 1: {PLAIN} (at most 39 more)" in text
    assert text[6].startswith("trial 13: ok, 30,000 tokens/s (29,900–30,100), 60.00 GiB, 61.5 s, the best so far: mb 1")
    assert text[7].startswith(f"probe 2: {BEST} (at most 38 more, about 39 min")
    assert "trial 14 ended as infra (port taken), attempt 2 follows" in text[8]
    assert text[10].startswith(
        "trial 16: oom_device in forward, OutOfMemoryError: CUDA out of memory [GPU 0], 9.0 s: mb"
    )
    assert text[11].startswith("trial 17: oom_device in forward (inferred): mb 16")
    assert text[12:] == ["search ended: every candidate is tried", f"confirmation 1 of 4: {BEST}"]


def test_a_plan_has_a_line_for_every_tenth_of_the_tracing_and_one_for_every_candidate(ok: Any) -> None:
    err = io.StringIO()
    with progress(err, MACHINE, None) as watched:
        watched.started(replace(OVERVIEW, predicted=True))
        for done in range(1, 41):
            watched.preparing(done, 40)
        watched.probing(PLAIN, 1, 39)
        watched.finished(record(PLAIN, ok(30_000.0), 13))
    text = [line[9:] for line in err.getvalue().splitlines()]
    assert "budget 40 predictions" in text[4]
    assert text[5:-1] == [f"tracing: {done} of 40" for done in range(4, 41, 4)]
    assert text[-1].startswith("trial 13: ok")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def test_a_terminal_gets_a_live_display(tty: Terminal, ok: Any) -> None:
    with progress(tty, MACHINE, None) as watched:
        assert isinstance(watched, LiveProgress)
        a_sweep(watched, ok)
        shown = io.StringIO()
        Console(file=shown, width=160).print(watched)
    text = shown.getvalue()
    assert re.search(r"now +confirmation 1 of 4: mb 4", text)
    assert re.search(r"best +40,000 tokens/s", text)
    assert re.search(r"left +at most 3 more, about", text)
    assert re.search(r"note +search ended: every candidate is tried", text)
    assert re.search(r"16 +mb 8 × acc 16 .* oom_device in forward +– +≥ 310.00 GiB +9.0 s", text)
    assert "36 some-rule" in tty.getvalue()
    assert "\x1b[" in tty.getvalue()


def test_no_color_is_respected(tty: Terminal, ok: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with progress(tty, MACHINE, None) as watched:
        a_sweep(watched, ok)
    assert not re.search(r"\x1b\[[\d;]*3[0-7]m", tty.getvalue())


def test_a_dumb_terminal_gets_lines(tty: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress(tty, MACHINE, None), LineProgress)


def test_only_what_leaves_the_headroom_is_the_best_so_far(ok: Any) -> None:
    watched = progress(io.StringIO(), MACHINE, None, [record(PLAIN, ok(30_000.0))])
    assert watched.best is not None
    watched.finished(record(BEST, ok(50_000.0, peak_reserved_bytes=79 * GIB)))
    watched.finished(record(BEST, ok(50_000.0), confirmation=True))
    assert watched.best.key == PLAIN.key
    watched.finished(record(BEST, ok(40_000.0)))
    assert watched.best.key == BEST.key


def test_the_time_left_is_that_of_the_probes_left_within_the_budget(ok: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    watched = progress(io.StringIO(), MACHINE, None)
    watched.probing(PLAIN, 1, 10)
    assert watched.time_left() is None
    watched.finished(record(PLAIN, ok(1.0, wall_s=20.0)))
    watched.probing(BEST, 2, 9)
    now += 5
    assert watched.time_left() == 15 + 9 * 20
    limited = progress(io.StringIO(), MACHINE, 2.0)
    now += 30
    assert limited.time_left() == 90


def summary(result: Result) -> str:
    out = io.StringIO()
    print_summary(out, MACHINE, result, OVERVIEW.ledger, [Path("studies/s/deepspeed_config.json")])
    return out.getvalue()


def a_result(winner: ProbeRecord, reference: ProbeRecord, baseline: ProbeRecord | None) -> Result:
    done = Counts(Counter({"ok": 20, "oom_device": 8}), 25, 3, 0, 1)
    return Result(winner, reference, baseline, [winner, reference], done, "every candidate is tried")


def test_the_summary_names_winner_gain_ledger_and_files(ok: Any) -> None:
    winner, reference = record(BEST, ok(40_000.0), 30), record(PLAIN, ok(32_000.0), 31)
    text = summary(a_result(winner, reference, record(PLAIN, ok(31_000.0))))
    assert "20 ok, 8 oom_device (25 probes, 3 inferred, 2 confirmations)" in text
    assert re.search(r"winner +mb 4 × acc 16  z2  bf16  \(trial 30\)", text)
    assert "40,000 tokens/s (39,900–40,100), 5,000 per device" in text
    assert "60.00 GiB of 80.00 GiB device memory (75.0 %), host 20.00 GiB" in text
    assert re.search(r"baseline +mb 1 .*\(trial 31, the untuned default\)", text)
    assert re.search(r"gain +\+25.0 % \(\+24.3 % to \+25.7 %\)", text)
    assert OVERVIEW.ledger in text
    assert text.endswith("\nstudies/s/deepspeed_config.json\n")


def test_a_baseline_that_does_not_fit_is_shown_as_the_oom_it_is(ok: Any) -> None:
    winner, reference = record(BEST, ok(40_000.0)), record(BEST.replace(micro_batch=1), ok(20_000.0))
    text = summary(a_result(winner, reference, record(PLAIN, OOM)))
    assert "oom_device in forward: it takes at least 310.00 GiB, and there are 80.00 GiB" in text
    assert "the feasible candidate nearest to it" in text
    assert "+100.0 %" in text


def test_overlapping_spreads_are_no_gain(ok: Any) -> None:
    winner, reference = record(BEST, ok(40_000.0)), record(PLAIN, ok(39_900.0))
    assert "no significant difference: +0.3 %" in summary(a_result(winner, reference, reference))


def test_an_untuned_default_that_wins_is_said_to(ok: Any) -> None:
    winner = record(PLAIN, ok(40_000.0))
    text = summary(a_result(winner, winner, winner))
    assert re.search(r"gain +none: the untuned default is the winner", text)
    assert "baseline" not in text
