"""Whatever a rank does, the probe has the right outcome, ends in time, and the next one is none the worse."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun import watch
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.probe.torchrun.rundir import run_directory
from autotune.process import Identity
from autotune.workload.phase import Phase

from .conftest import CHECKPOINTED, PLAIN, STAGES, Probe, replace, settings
from .matrix import MATRIX, Row
from .trouble import (
    Happening,
    confined,
    delete_run_directory,
    kill_agent,
    kill_fork_server,
    kill_host,
    once_marked,
    stop_fork_server,
)

pytestmark = pytest.mark.probes

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

    @pytest.fixture(autouse=True)
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "runs"
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        return folder

    @pytest.mark.parametrize(
        ("happens", "message"),
        [
            (kill_host, "the launcher's host process died"),
            (kill_fork_server, "the fork server died"),
            (delete_run_directory, "the run directory was deleted under the probe"),
        ],
    )
    def test_while_ranks_are_at_work(
        self, faulty: Faulty, probe: Probe, runs: Path, tmp_path: Path, happens: Happening, message: str
    ) -> None:
        mark = tmp_path / "mark"
        with once_marked(mark, happens, runs):
            measured = faulty("hang", PLAIN, mark=str(mark))
        assert measured.outcome is Outcome.INFRA
        assert message in str(measured.message)
        assert measured.wall_s < 20 + 10
        assert probe(PLAIN).outcome is Outcome.OK

    def test_a_killed_torchrun_of_the_cold_launcher(
        self, monkeypatch: pytest.MonkeyPatch, runs: Path, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(Path(__file__).parent)
        mark = tmp_path / "mark"
        model = ["model=custom", "model.factory=faulty:build", f"+model.args={{fault:hang,mark:{mark}}}"]
        mine = settings(*model, "launcher=cold", "probe.deadline_s=60")
        with once_marked(mark, kill_agent, runs):
            measured = TorchrunProber(mine, make_launcher(mine)).probe(ProbeRequest(PLAIN, 1))
        assert (measured.outcome, measured.message) == (Outcome.INFRA, "torchrun ended without a report")

    def test_a_fork_server_that_forks_no_more(
        self, launcher: Launcher, runs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prober = TorchrunProber(settings(), launcher)
        assert prober.probe(ProbeRequest(PLAIN, 1)).outcome is Outcome.OK
        monkeypatch.setattr(watch, "BEGIN_S", 2.0)
        stop_fork_server(runs)
        measured = prober.probe(ProbeRequest(PLAIN, 1))
        assert measured.outcome is Outcome.INFRA
        assert measured.message == "no rank had begun after 2 s"
        monkeypatch.setattr(watch, "BEGIN_S", 60.0)
        assert prober.probe(ProbeRequest(PLAIN, 1)).outcome is Outcome.OK

    def test_run_directories_of_killed_tuners_are_removed(self, launcher: Launcher, runs: Path) -> None:
        with run_directory() as living:
            killed = living.with_name(living.name.replace(f"-{Identity.here().started}-", "-1-"))
            elsewhere = "autotune-probe-12345678-1-1-x"  # of a container that shares the temporary folder
            for name in (killed.name, elsewhere, "autotune-probe-mine"):
                (runs / name).mkdir()
            TorchrunProber(settings(), launcher)
            assert {path.name for path in runs.iterdir()} == {living.name, elsewhere, "autotune-probe-mine"}


SMALL = (
    *("machine=cpu", "model.config.num_hidden_layers=2", "model.config.vocab_size=8192", "workload.seq_len=64"),
    *("workload.global_batch=4", "space.micro_batch=2", "space.zero_stage=1", "space.offload_optimizer=none"),
    *("space.offload_param=none", "space.checkpoint_blocks=none", "probe.steps=1"),
)


@pytest.mark.parametrize(
    ("place", "size", "words"),
    [
        (
            "/dev/shm",
            "16m",
            ("/dev/shm has 16 MiB left", "make it larger (docker run --shm-size"),
        ),
        ("small", "16k", ("(TMPDIR) is full",)),
    ],
)
def test_a_full_place_ends_a_sweep_with_a_sentence_that_says_what_to_do(
    tmp_path: Path, place: str, size: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "small").mkdir()
    run = confined(tmp_path, [(place, size)], *SMALL, TMPDIR=str(tmp_path / "small")).finish()
    assert run.code == 4, run.err
    assert all(word in run.err for word in words), run.err
    assert run.left == []
