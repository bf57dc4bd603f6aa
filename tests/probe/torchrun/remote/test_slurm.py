"""Two-node probes through a real Slurm, and what becomes of those that are cancelled, out of time or alone."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InfraError
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber
from autotune.probe.torchrun.remote.allocation import submit
from autotune.probe.torchrun.remote.launcher import Remote
from autotune.workload.phase import Phase
from tests.commands import autotune, wait_for
from tests.slurm import Slurm
from tests.test_tune import MODEL, PLAIN, is_rank, trials

from ..conftest import PLAIN as CANDIDATE
from ..conftest import settings
from .conftest import two_nodes, with_fault

pytestmark = pytest.mark.probes

SLURM = ("launcher=slurm", "probe.deadline_s=120")
STUDY = "gpt_tiny-cpu-2x1"
SWEEP = (
    *MODEL,
    *PLAIN,
    *("launcher=slurm", "machine.nodes=2", "machine.devices_per_node=1", "probe.threads=1"),
    *("probe.steps=1", "probe.confirm_steps=1", "probe.warmup_steps=1", "objective.finalists=1"),
    *("space.micro_batch=1", "space.zero_stage=1", "launcher.sbatch_args='--nodelist n3,n4'"),
)
NODE_PROGRAM = """
import os, sys
from autotune.probe.torchrun.remote.wire import encode
names = {name: os.environ[name] for name in ("SLURM_STEP_ID", "SLURMD_NODENAME")}
node = os.environ["SLURM_NODEID"]
hello = {"node": int(node), "kind": "hello", "host": node, "port": 9, "slurm": names}
os.write(1, encode(hello, node))
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def allocation(slurm: Slurm) -> Iterator[str]:
    """An allocation of two nodes, in which the tests stand, beside the model that fails."""
    job = slurm.allocate("n1,n2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(slurm.config))
        patch.setenv("SLURM_JOB_ID", job)
        patch.chdir(Path(__file__).parents[1])
        yield job


@pytest.fixture(scope="module", autouse=True)
def out_of_time(
    slurm: Slurm, allocation: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[Measurement]]:
    """A probe that hangs and whose step has a minute, in the background of the other tests; its nodes have a TMPDIR."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    step = f"launcher.srun_args='--time 1 --export ALL,TMPDIR={elsewhere}'"
    nodes = two_nodes(*with_fault("hang"), "launcher=slurm", "probe.deadline_s=600", step)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(nodes.probe)
        wait_for(lambda: len(list(elsewhere.glob("autotune-probe-*/rank*.pulse"))) == 2 or future.done())
        (step,) = slurm.steps()
        yield future
        if not future.done():  # nobody has waited for it
            slurm.ask("scancel", step)


class TestARank:
    @pytest.mark.parametrize(
        ("fault", "message"),
        [("raises", "RuntimeError: the model says no"), ("kill", "rank 1 was killed by SIGKILL")],
    )
    def test_that_fails_on_one_node_ends_the_others_and_is_told_as_what_it_is(self, fault: str, message: str) -> None:
        measured = two_nodes(*with_fault(fault), *SLURM).probe()
        assert (measured.outcome, measured.phase) == (Outcome.CRASHED, Phase.FORWARD), measured
        assert message in (measured.message or "")
        assert len(measured.detail["host_bytes"]) == 2


class TestAPort:
    def test_that_is_taken_is_our_trouble_and_another_serves_the_next_probe_which_trains_as_one_node_does(
        self, launcher: Launcher
    ) -> None:
        nodes = two_nodes(*SLURM)
        with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
            taken.bind(("", 0))
            taken.listen()
            patch.setattr(nodes.launcher, "endpoint", lambda hello: ("127.0.0.1", taken.getsockname()[1]))
            measured = nodes.probe()
            assert measured.outcome is Outcome.INFRA, measured
            assert "Rendezvous" in (measured.message or "")
        measured = nodes.probe()
        assert measured.outcome is Outcome.OK, measured
        assert measured.losses == TorchrunProber(settings(), launcher).probe(ProbeRequest(CANDIDATE, steps=1)).losses
        assert {m["rank"] for m in measured.memory["forward"]} == {0, 1}


class TestAStep:
    """Of node programs that only say hello: what Slurm does to them is what matters."""

    @pytest.fixture
    def launcher(self, tmp_path: Path) -> Remote:
        (tmp_path / "node.py").write_text(NODE_PROGRAM)
        return self.of(tmp_path, f"exec {sys.executable} {tmp_path}/node.py")

    def of(self, folder: Path, script: str, *overrides: str) -> Remote:
        """A launcher whose nodes run a piece of shell."""
        (folder / "spec.json").write_text("{}")
        program = folder / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return two_nodes(*SLURM, f"launcher.python={program}", *overrides).launcher

    def run(self, launcher: Remote, tmp_path: Path, slurm: Slurm, then: Callable[[str], object]) -> dict[str, Any]:
        """Run a probe's step, do something to it, and return the report."""
        spec = tmp_path / "spec.json"
        known = set(slurm.steps())
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(launcher.run, spec, 2, 120.0)
            wait_for(lambda: len(set(slurm.steps()) - known) == 1 and launcher.reached)
            (step,) = set(slurm.steps()) - known
            then(step)
            return running.result(30)

    def test_that_is_cancelled_is_our_trouble(self, launcher: Remote, tmp_path: Path, slurm: Slurm) -> None:
        report = self.run(launcher, tmp_path, slurm, lambda step: slurm.ask("scancel", step))
        assert "was cancelled" in report["error"]
        assert not report["timed_out"]

    def test_whose_allocation_is_cancelled_is_our_trouble_and_the_next_has_none(
        self, launcher: Remote, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = slurm.allocate("n3,n4")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        report = self.run(launcher, tmp_path, slurm, lambda step: slurm.ask("scancel", job))
        assert f"Slurm's allocation {job} is over (CANCELLED)" in report["error"]
        with pytest.raises(InfraError, match=f"Slurm's allocation {job} is over") as over:
            launcher.run(tmp_path / "spec.json", 2, 10.0)
        assert "another allocation" in over.value.hint

    def test_that_loses_a_node_is_our_trouble(
        self, launcher: Remote, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", slurm.allocate("n3,n4"))
        down = ("scontrol", "update", "nodename=n4", "state=down", "reason=test")
        report = self.run(launcher, tmp_path, slurm, lambda step: slurm.ask(*down))
        slurm.ask("scontrol", "update", "nodename=n4", "state=idle")
        assert "is over (NODE_FAIL" in report["error"]

    def test_that_cannot_start_is_an_error_that_says_what_to_do(self, tmp_path: Path, allocation: str) -> None:
        with pytest.raises(InfraError, match="srun could not start the node programs") as refused:
            self.of(tmp_path, "exit 127").run(tmp_path / "spec.json", 2, 10.0)
        assert "launcher.python" in refused.value.hint

    def test_that_does_not_start_in_time_is_our_trouble(self, tmp_path: Path, allocation: str) -> None:
        waiting = self.of(tmp_path, "exec cat >/dev/null", "launcher.start_s=1")
        report = waiting.run(tmp_path / "spec.json", 2, 10.0)
        assert "had not started after 1 s" in report["error"]


def test_an_allocation_is_waited_for_with_news_and_given_back_when_that_is_interrupted(slurm: Slurm) -> None:
    wanted = settings("machine.nodes=2", "launcher=slurm", "launcher.sbatch_args='--nodelist n3,n4 --begin now+1hour'")
    told: list[str] = []

    def interrupting(news: str) -> None:
        told.append(news)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(wanted.launcher, wanted.machine, interrupting)
    assert re.fullmatch(r"waiting for Slurm's allocation \d+: PENDING(, \w+)?", told[0])
    assert "autotune" not in slurm.ask("squeue", "--noheader", "--format=%j")


def test_what_slurm_refuses_is_an_error_that_says_so(allocation: str) -> None:
    wanted = settings("machine.nodes=2", "launcher=slurm", "launcher.partition=nonesuch")
    with pytest.raises(InfraError, match=r"sbatch failed .*[Ii]nvalid partition") as refused:
        submit(wanted.launcher, wanted.machine, print)
    assert "launcher.partition" in refused.value.hint


@pytest.fixture(scope="module")
def swept(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep in an allocation of its own: a step is cancelled, then the controller killed; then it goes on."""
    folder = tmp_path_factory.mktemp("sweep")
    known = set(slurm.steps())
    with pytest.MonkeyPatch.context() as outside:
        outside.delenv("SLURM_JOB_ID", raising=False)
        run = autotune(folder, *SWEEP, SLURM_CONF=str(slurm.config))
    run.until(" probe 1: ")
    wait_for(lambda: sum(map(is_rank, run.living())) >= 2)
    (step,) = set(slurm.steps()) - known
    slurm.ask("scancel", step)
    wait_for(lambda: len(set(slurm.steps()) - known) == 1 and step not in slurm.steps())
    wait_for(lambda: any("forkserver" in " ".join(process.cmdline()) for process in run.living()))
    run.process.send_signal(signal.SIGKILL)
    run.finish()
    assert run.left == []
    wait_for(lambda: set(slurm.steps()) <= known)  # of those that were there before, some may have ended too
    wait_for(lambda: "autotune" not in slurm.ask("squeue", "--noheader", "--format=%j"))
    with pytest.MonkeyPatch.context() as outside:
        outside.delenv("SLURM_JOB_ID", raising=False)
        again = autotune(folder, *SWEEP, SLURM_CONF=str(slurm.config)).finish()
    assert again.code == 0, again.err
    assert again.left == []
    return folder, again.out


class TestASweep:
    def test_goes_on_to_a_winner_and_its_files(self, swept: tuple[Path, str]) -> None:
        folder, said = swept
        assert "winner" in said
        config = json.loads((folder / "studies" / STUDY / "deepspeed_config.json").read_text())
        assert config["zero_optimization"]["stage"] == 1
        recipe = json.loads((folder / "studies" / STUDY / "recipe.json").read_text())
        assert recipe["machine"]["nodes"] == 2

    def test_tries_the_probe_again_whose_step_was_cancelled(self, swept: tuple[Path, str]) -> None:
        rows = trials(swept[0], STUDY)
        assert [row["outcome"] for row in rows].count("infra") == 1
        assert {row["outcome"] for row in rows} == {"infra", "ok"}

    def test_gives_its_allocation_back(self, swept: tuple[Path, str], slurm: Slurm) -> None:
        wait_for(lambda: "autotune" not in slurm.ask("squeue", "--noheader", "--format=%j"))


def test_a_probe_that_its_steps_time_limit_ends_is_out_of_time(out_of_time: Future[Measurement]) -> None:
    measured = out_of_time.result(120)
    assert measured.outcome is Outcome.TIMEOUT, measured
    assert measured.phase is Phase.FORWARD
