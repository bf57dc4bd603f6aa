"""Whatever a rank does, the probe has the right outcome, ends in time, and the next one is none the worse."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun import watch
from autotune.probe.torchrun.prober import TorchrunProber
from autotune.probe.torchrun.warm import Warm
from autotune.workload.phase import Phase

from .conftest import CHECKPOINTED, PLAIN, STAGES, Probe, replace, settings
from .matrix import MATRIX, Row

Faulty = Callable[..., Measurement]


def representatives() -> list[Row]:
    """Each kind of fault in one phase, each phase with some kind; `make bench-faults` tries all in all."""
    kinds: dict[str, list[Row]] = {}
    for row in MATRIX:
        kinds.setdefault(row.kind, []).append(row)
    return [rows[index % len(rows)] for index, rows in enumerate(kinds.values())]


@pytest.mark.parametrize("row", representatives(), ids=lambda row: f"{row.kind}-{row.at}")
def test_a_fault_on_one_rank_is_told_as_what_it_is(faulty: Faulty, row: Row) -> None:
    began = time.monotonic()
    deadline = 5 if row.lasts else 20
    measured = faulty(row.kind, PLAIN, f"probe.deadline_s={deadline}", at=row.at)
    assert time.monotonic() - began < deadline + 10
    assert (measured.outcome, measured.phase) == (row.outcome, row.phase), measured
    assert row.message in (measured.message or "")


def test_the_probe_after_all_those_is_none_the_worse(probe: Probe) -> None:
    assert probe(PLAIN).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no_loss", "without a scalar loss"),
        ("memory", "MemoryError"),  # far from the device's limit: not its OOM
        ("refuses", "ValueError: the model says no"),
    ],
)
def test_what_a_model_raises_is_a_crash_with_its_words(faulty: Faulty, fault: str, message: str) -> None:
    measured = faulty(fault)
    assert (measured.outcome, measured.phase) == (Outcome.CRASHED, Phase.FORWARD)
    assert message in (measured.message or "")


def test_a_rank_that_hangs_is_ended_at_the_deadline_and_its_peers_with_it(faulty: Faulty) -> None:
    measured = faulty("hang", PLAIN, "probe.deadline_s=4")
    assert (measured.outcome, measured.phase) == (Outcome.TIMEOUT, Phase.FORWARD)
    assert measured.wall_s < 4 + 10


def test_a_skipped_step_is_not_a_step(faulty: Faulty) -> None:
    measured = faulty("overflow", replace(PLAIN, accumulation=1, micro_batch=4))
    assert measured.outcome is Outcome.OK, measured
    assert measured.skipped_steps == 3
    states = 12 * (256 * 64 + 4 * (2 * 64 * 256 + 256 + 64)) // 2
    assert max(int(meters["live"]) for meters in measured.memory["step"]) > states


def test_what_deepspeed_refuses_is_invalid(probe: Probe) -> None:
    odd = probe(replace(PLAIN, allgather_bucket_size=2_000_001))
    assert odd.outcome is Outcome.INVALID
    assert odd.phase is Phase.INIT


class TestCheckpointing:
    def test_of_a_custom_model_is_real(self, faulty: Faulty) -> None:
        plain, checkpointed = (
            faulty("none", replace(PLAIN, micro_batch=4, accumulation=1, **knobs)) for knobs in ({}, CHECKPOINTED)
        )
        assert plain.losses == checkpointed.losses
        peaks = [max(int(m["allocated"]) for m in x.memory["forward"]) for x in (plain, checkpointed)]
        assert peaks[1] < peaks[0]

    def test_works_where_zero_partitions_a_custom_models_parameters(self, faulty: Faulty) -> None:
        assert faulty("none", replace(PLAIN, **STAGES[3], **CHECKPOINTED)).outcome is Outcome.OK

    def test_without_an_effect_is_a_crash_that_says_so(self, faulty: Faulty) -> None:
        bypassed = faulty("bypass", replace(PLAIN, **CHECKPOINTED))
        assert bypassed.outcome is Outcome.CRASHED
        assert "never called as a module" in (bypassed.message or "")

    def test_of_a_model_without_blocks_or_without_such_a_part_is_a_crash_that_says_so(self, faulty: Faulty) -> None:
        alone = faulty("none", replace(PLAIN, **CHECKPOINTED), blocks=1)
        assert alone.outcome is Outcome.CRASHED
        assert "no list of repeated blocks" in (alone.message or "")
        no_attention = faulty("none", replace(PLAIN, **{**CHECKPOINTED, "checkpoint_part": "attention"}))
        assert no_attention.outcome is Outcome.CRASHED
        assert "no part named like its attention" in (no_attention.message or "")


class TestOurOwnTrouble:
    """Is `infra`, whatever the ranks were doing, and the next probe has all that it needs."""

    @pytest.fixture
    def meanwhile(self, faulty: Faulty, probe: Probe, tmp_path: Path) -> Callable[[Callable[[], object]], Measurement]:
        """Probe a model that hangs, and have something happen once it does."""

        def run(happens: Callable[[], object]) -> Measurement:
            assert probe(PLAIN).outcome is Outcome.OK
            mark = tmp_path / "mark"

            def wait() -> None:
                deadline = time.monotonic() + 15
                while not mark.exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                happens()

            thread = threading.Thread(target=wait)
            thread.start()
            measured = faulty("hang", PLAIN, mark=str(mark))
            thread.join()
            assert measured.wall_s < 15 + 10
            assert probe(PLAIN).outcome is Outcome.OK
            return measured

        return run

    def test_a_killed_host_process(self, meanwhile: Callable[..., Measurement], launcher: Warm) -> None:
        measured = meanwhile(lambda: os.kill(_pid(launcher), signal.SIGKILL))
        assert measured.outcome is Outcome.INFRA
        assert measured.message == "the launcher's host process died"

    def test_a_killed_fork_server(self, meanwhile: Callable[..., Measurement], launcher: Warm) -> None:
        measured = meanwhile(lambda: os.kill(_fork_server(launcher), signal.SIGKILL))
        assert measured.outcome is Outcome.INFRA
        assert measured.message == "the fork server died"

    def test_a_deleted_run_directory(self, meanwhile: Callable[..., Measurement], tmp_path: Path) -> None:
        measured = meanwhile(lambda: [shutil.rmtree(run) for run in (tmp_path / "runs").iterdir()])
        assert measured.outcome is Outcome.INFRA
        assert "the run directory was deleted under the probe" in str(measured.message)

    @pytest.fixture(autouse=True)
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "runs").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs"))

    def test_a_fork_server_that_forks_no_more(self, launcher: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
        prober = TorchrunProber(settings(), launcher)
        assert prober.probe(ProbeRequest(PLAIN, 1)).outcome is Outcome.OK
        monkeypatch.setattr(watch, "BEGIN_S", 2.0)
        os.kill(_fork_server(launcher), signal.SIGSTOP)
        measured = prober.probe(ProbeRequest(PLAIN, 1))
        assert measured.outcome is Outcome.INFRA
        assert measured.message == "no rank had begun after 2 s"
        monkeypatch.setattr(watch, "BEGIN_S", 60.0)
        assert prober.probe(ProbeRequest(PLAIN, 1)).outcome is Outcome.OK


def _pid(launcher: Warm) -> int:
    assert launcher.pid is not None
    return launcher.pid


def _fork_server(launcher: Warm) -> int:
    children = psutil.Process(_pid(launcher)).children()
    return next(child.pid for child in children if "multiprocessing.forkserver" in " ".join(child.cmdline()))
