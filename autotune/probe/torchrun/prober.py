"""The real prober: one rank per device, DeepSpeed's engine, the wall clock and the memory meters."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import InfraError, SettingsError
from autotune.machine.baseline import Baseline
from autotune.machine.health import gpu_states
from autotune.probe.creep import at_risk
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.pace import straggler
from autotune.probe.prober import ProbeRequest
from autotune.probe.spread import median_spread
from autotune.probe.torchrun.cold import Cold
from autotune.probe.torchrun.describe import Description
from autotune.probe.torchrun.host_memory import HostFull, held_by_nodes
from autotune.probe.torchrun.launcher import Launcher, Tell, environment
from autotune.probe.torchrun.placement import placement
from autotune.probe.torchrun.remote.hosts import SshHosts
from autotune.probe.torchrun.remote.launcher import Remote
from autotune.probe.torchrun.remote.reach import REMOTE
from autotune.probe.torchrun.remote.slurm import SlurmSteps
from autotune.probe.torchrun.rundir import full_place, remove_stale, run_directory
from autotune.probe.torchrun.spec import ProbeSpec, Pulse, RankResult
from autotune.probe.torchrun.verdict import Evidence, Verdict, judge, memory_by_phase, worst
from autotune.probe.torchrun.warm import Warm
from autotune.settings import Settings
from autotune.space.config import deepspeed_config

SAMPLE_ABOVE = 4
"""Longer accumulations are timed by windows of 2 and of 4 micro-steps, except on CPU and in confirmations."""
PROTOCOL = 2
"""Raised whenever what is measured changes, so that older measurements are not taken for new ones."""


class TorchrunProber:
    """Measures candidates on the machine here.

    Args:
        settings: of the sweep.
        launcher: starts the ranks; closed with the prober.
        devices: what was found of the devices before, a sentence each: kept with every measurement.
    """

    kind = "torchrun"

    def __init__(self, settings: Settings, launcher: Launcher, devices: Sequence[str] = ()) -> None:
        self._devices = list(devices)
        self._settings = settings
        self._machine, self._workload = settings.machine, settings.workload
        self._threads, self._processors = placed(settings)
        self._launcher = launcher
        self._description: Description | None = None
        here = settings.machine.accelerator != "cpu" and settings.launcher.name not in REMOTE
        self._baseline = Baseline(settings.machine.devices_per_node, gpu_states if here else list)
        remove_stale()

    @property
    def protocol(self) -> dict[str, Any]:
        """How it is measured: measurements under different protocols are not the same."""
        probe = self._settings.probe
        return {"version": PROTOCOL, "warmup_steps": probe.warmup_steps, "steps": probe.steps}

    @property
    def threads(self) -> int:
        """Processor threads of each rank."""
        return self._threads

    def describe(self) -> Description:
        """What is known of the model before it is probed; looked up once.

        Raises:
            InfraError: the launcher does not start, or has no disk to work on.
        """
        if self._description is None:
            try:
                self._description = self._described()
            except OSError as error:
                raise InfraError(
                    f"a run directory cannot be used: {error}", "make room there, or name another place with TMPDIR"
                ) from error
        return self._description

    def _described(self) -> Description:
        with run_directory() as directory:
            asked = {"workload": self._workload.to_dict(), "working_directory": os.getcwd()}
            (directory / "workload.json").write_text(json.dumps(asked))
            self._launcher.describe(directory)
            path = directory / "description.json"
            return Description(**json.loads(path.read_text())) if path.exists() else Description()

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        """A measurement is made when it is asked for."""

    def probe(self, request: ProbeRequest) -> Measurement:
        """See Prober.

        Raises:
            InfraError: the launcher does not start, or too few devices have come back from the probes before.
        """
        self.describe()
        began = time.monotonic()
        try:
            return self._probe(request, began)
        except OSError as error:  # the run directory cannot be made, or the spec not be written
            message = f"the probe's run directory cannot be used: {error}"
            return Measurement(Outcome.INFRA, self.kind, message=message, wall_s=time.monotonic() - began)

    def _probe(self, request: ProbeRequest, began: float) -> Measurement:
        killed = _kernel_kills()
        with run_directory() as directory:
            spec = self.spec(request, directory)
            world = self._machine.world_size
            report = self._launcher.run(spec.write(), world, self._deadline_s(spec))
            evidence = Evidence(
                results=[RankResult.read(directory, rank) for rank in range(world)],
                beats=[Pulse.read(directory, rank) for rank in range(world)],
                exit_codes={int(rank): code for rank, code in report["exit_codes"].items()},
                timed_out=report["timed_out"],
                stopped=report["stopped"],
                vanished=report["vanished"],
                agent_error=report["error"],
                kernel_killed=_kernel_kills() > killed,
                host_full=next((HostFull(**host["full"]) for host in report["hosts"] if host["full"]), None),
                torn=[rank for rank in range(world) if RankResult.torn(directory, rank)],
                full=full_place(),
            )
            verdict = judge(evidence)
            detail = _detail(directory, verdict, evidence)
            detail["host_bytes"] = [host["peak_bytes"] for host in report["hosts"]]
        if aside := self._baseline.returned():
            detail["set_aside"] = aside
        return self._measurement(request, evidence, verdict, detail, time.monotonic() - began)

    def close(self) -> None:
        """See Prober."""
        self._launcher.close()

    def spec(self, request: ProbeRequest, directory: Path) -> ProbeSpec:
        """All that the ranks of a probe need to know."""
        candidate = request.candidate
        return ProbeSpec(
            directory=str(directory),
            working_directory=os.getcwd(),
            candidate=candidate,
            workload=self._workload,
            machine=self._machine,
            deepspeed_config=deepspeed_config(candidate, self._workload, self._machine, self._settings.space.nvme_path),
            parameters=self.describe().parameters,
            warmup_steps=self._settings.probe.warmup_steps,
            steps=request.steps,
            sampled_accumulation=self._sampled(candidate.accumulation) and not request.confirmation,
            stop_below_tokens_per_s=None if request.confirmation else request.stop_below_tokens_per_s,
            threads=self._threads,
            processors=self._processors,
            host_reserve_gib=self._settings.probe.host_reserve_gib,
            devices=self._baseline.spared,
        )

    def _deadline_s(self, spec: ProbeSpec) -> float:
        probe = self._settings.probe
        accumulation = spec.candidate.accumulation
        searched = replace(spec, steps=probe.steps, sampled_accumulation=self._sampled(accumulation))
        return probe.deadline_s * max(1.0, spec.micro_steps / searched.micro_steps)

    def _sampled(self, accumulation: int) -> bool:
        """Whether a probe of the search samples the accumulation instead of running it in full."""
        return self._machine.accelerator != "cpu" and accumulation > SAMPLE_ABOVE

    def _measurement(
        self, request: ProbeRequest, evidence: Evidence, verdict: Verdict, detail: dict[str, Any], wall_s: float
    ) -> Measurement:
        results = evidence.results
        memory = memory_by_phase(results)
        allocated, reserved, total = (worst(memory, m) for m in ("allocated", "reserved", "device_total"))
        needed = [r.needed_bytes for r in results if r is not None and r.needed_bytes]
        if evidence.host_full is not None and evidence.host_full.needed_bytes and verdict.outcome is Outcome.OOM_HOST:
            needed.append(evidence.host_full.needed_bytes)
        machine = self._machine
        hosts = held_by_nodes(memory, machine.nodes, machine.devices_per_node, detail["host_bytes"])
        detail |= {"host_bytes": hosts} | ({"devices": self._devices} if self._devices else {})
        whole: dict[str, Any] = {}
        first = results[0] if results else None
        if first is not None and verdict.outcome in (Outcome.OK, Outcome.STOPPED):
            whole = self._speed(request, first, verdict.outcome)
            whole["overhead_s"] = wall_s - first.unmeasured_s - first.measured_s
            whole |= {"losses": first.losses, "gradient_norms": first.gradient_norms}
            detail["steps"] = [r.steps for r in results if r is not None]
            detail["pace_s"] = [r.pace_s for r in results if r is not None]
            if slow := straggler(detail["pace_s"]):
                node, device = divmod(slow["rank"], machine.devices_per_node)
                detail["straggler"] = {**slow, "node": node, "device": device}
            if request.confirmation:
                used = (total or reserved or allocated or (0, 0))[0]
                whole["at_risk"] = at_risk(detail["steps"], machine, used, max(hosts))
        return Measurement(
            outcome=verdict.outcome,
            probe_kind=self.kind,
            phase=verdict.phase,
            message=verdict.message,
            peak_allocated_bytes=allocated[0] if allocated else None,
            peak_reserved_bytes=reserved[0] if reserved else None,
            device_total_bytes=total[0] if total else None,
            worst_rank=allocated[1] if allocated else verdict.rank,
            needed_bytes=max(needed, default=None),
            host_peak_bytes=max(hosts) or None,
            skipped_steps=max((r.skipped_steps for r in results if r is not None), default=0),
            memory=memory,
            wall_s=wall_s,
            environment=next((r.environment for r in results if r is not None), {}) | {"launcher": self._launcher.name},
            detail=detail,
            **whole,
        )

    def _speed(self, request: ProbeRequest, first: RankResult, outcome: Outcome) -> dict[str, Any]:
        candidate = request.candidate
        sequences = candidate.micro_batch * candidate.accumulation * self._machine.world_size
        tokens = sequences * self._workload.seq_len
        step, low, high = median_spread(first.step_times_s)
        if outcome is Outcome.STOPPED:  # the upper bound that was not enough: too few steps for a spread
            step = min(first.step_times_s)
            return {"tokens_per_s": tokens / step, "step_s": step, "step_times_s": first.step_times_s}
        return {
            "tokens_per_s": tokens / step,
            "tokens_per_s_low": tokens / high,
            "tokens_per_s_high": tokens / low,
            "step_s": step,
            "step_times_s": first.step_times_s,
        }


def make_launcher(settings: Settings, tell: Tell = lambda text: None) -> Launcher:
    """The launcher that the settings name; nothing is started yet.

    Args:
        settings: of the sweep.
        tell: takes a sentence when something takes its time (imports, compilation).

    Raises:
        SettingsError: there is none of that name.
    """
    name = settings.launcher.name
    environ = environment(settings.machine, settings.workload, placed(settings)[0])
    launchers: dict[str, Callable[[], Launcher]] = {
        "warm": lambda: Warm(environ, tell),
        "cold": lambda: Cold(environ, tell),
        "slurm": lambda: Remote(SlurmSteps(settings, tell), settings.machine, environ, settings.launcher.start_s, tell),
        "hosts": lambda: Remote(SshHosts(settings), settings.machine, environ, settings.launcher.start_s, tell),
    }
    if name not in launchers:
        raise SettingsError(f"launcher={name} is unknown", f"one of {', '.join(sorted(launchers))}")
    return launchers[name]()


def placed(settings: Settings) -> tuple[int, list[list[int]]]:
    """(threads per rank, processors of each local rank); other nodes choose among their own processors."""
    machine = settings.machine
    here = sorted(os.sched_getaffinity(0))
    available = range(machine.cores) if settings.launcher.name in REMOTE and machine.cores else here
    return placement(available, machine.devices_per_node, settings.probe.threads)


def _detail(directory: Path, verdict: Verdict, evidence: Evidence) -> dict[str, Any]:
    """What someone would want to read about a probe that did not go well."""
    if verdict.outcome in (Outcome.OK, Outcome.STOPPED):
        first = evidence.results[0]
        return {"timeline_s": first.timeline_s} if first is not None else {}
    detail: dict[str, Any] = {"rank": verdict.rank, "exit_codes": evidence.exit_codes}
    if verdict.trace:
        detail["trace"] = verdict.trace
    else:
        logs = sorted(directory.glob(f"logs/**/{verdict.rank or 0}/stderr.log")) + sorted(directory.glob("agent*.log"))
        tails = [text for log in logs if (text := _tail(log))]
        if tails:
            detail["stderr"] = tails[0]
    return detail


def _tail(log: Path) -> str:
    """The end of a log, which may be of any length."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        return file.read().decode(errors="replace").strip()


def _kernel_kills() -> int:
    """How often the kernel's OOM killer has struck here (cgroup v2's memory.events, else the kernel's)."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0
