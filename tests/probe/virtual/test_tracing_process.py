"""The process that traces ends with who started it, whatever happens, and is started again when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from autotune.errors import InfraError
from autotune.probe.measurement import Outcome
from tests.probe.torchrun.conftest import PLAIN

from .conftest import CountingTracer, MakeProber, probe

CONTROLLER = """
import sys, threading
from autotune.candidate import Candidate
from autotune.probe.prober import ProbeRequest
from autotune.probe.virtual.prober import VirtualProber
from autotune.settings import compose_settings

base = ["model=custom", "model.factory=models:build", "machine=a100_80g", "workload.seq_len=32"]
plain = Candidate(micro_batch=1, accumulation=1, zero_stage=0, precision="bf16")
prober = VirtualProber(compose_settings(base))
print(prober.probe(ProbeRequest(plain, 1)).outcome.value, "torch" in sys.modules, flush=True)
try:
    hanging = VirtualProber(compose_settings([*base, "+model.args={deed:hang}"]), tracer=prober._tracer)
    threading.Timer(1.5, print, ["tracing"], {"flush": True}).start()
    hanging.probe(ProbeRequest(plain, 1))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
"""


def family(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def test_a_controller_imports_no_torch_and_leaves_nothing_when_interrupted(tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        cwd=Path(__file__).parent,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "ok False\n"
        assert controller.stdout.readline() == "tracing\n"
        here = psutil.Process(controller.pid)
        assert len(family(here)) >= 3  # the process that traces, its job, and the run that hangs
        controller.send_signal(signal.SIGINT)
        assert controller.stdout.readline() == "interrupted\n"
        assert family(here) == []
        controller.communicate("")
        assert controller.returncode == 0


def test_one_that_is_killed_is_our_trouble_and_the_next_call_starts_another(
    prober: MakeProber, tracer: CountingTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    small = ("model=custom", "model.factory=models:build", "machine=a100_80g", "workload.seq_len=16")
    made = prober("+model.args={deed:hang}", base=small)
    made.describe()
    process = tracer._process
    assert process is not None
    before = family(psutil.Process(process.pid))
    timer = threading.Timer(1.0, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(InfraError, match="the process that traces died"):
        probe(made, PLAIN)
    timer.join()
    assert process.poll() is not None
    deadline = time.monotonic() + 5
    while any(child.is_running() for child in before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(child.is_running() for child in before)
    assert probe(prober(base=small), PLAIN).outcome is Outcome.OK


def test_one_that_is_interrupted_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch, prober: MakeProber) -> None:
    starting = CountingTracer()
    made = prober("workload.seq_len=8", tracer=starting)
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        made.predict(PLAIN)
    timer.join()
    assert starting._process is None
