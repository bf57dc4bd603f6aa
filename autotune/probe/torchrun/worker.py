"""What runs in every rank: build, initialise, warm up, tape, measure; its end, good or bad, is one result file."""

from __future__ import annotations

import copy
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from autotune.probe.torchrun import shared_memory
from autotune.probe.torchrun.failure import DivergedError, UnfitRank, classify, is_peer_lost, requested_bytes
from autotune.probe.torchrun.leash import die_first, die_with_parent
from autotune.probe.torchrun.spec import CANNOT_WRITE, ProbeSpec, Pulse, RankResult
from autotune.space.config import allocator_environment
from autotune.workload.phase import Phase

MOST_SKIPPED = 40
"""fp16's dynamic loss scale starts at 2**16 and halves with every skipped step; after so many, training diverges."""
PEER_GRACE_S = 0.5
"""A rank that only saw a peer go ends so much later, seconds, so that the agent sees that peer's end first."""
HOPE = 1.1
"""A probe goes on while its best step, made faster by this factor, would still reach the best candidate."""


def run(spec_path: str) -> None:
    """Run one rank of a probe; called in a forked process (warm) or as a program (cold).

    Never raises: a failure is written to the rank's result file, and the process ends at once, because its peers
    may be waiting for it in a collective.
    """
    die_with_parent()
    die_first()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    spec = ProbeSpec.read(spec_path)
    pulse = Pulse(spec.directory, rank)
    result = RankResult(rank=rank)
    probe = _Rank(spec, rank, local_rank, pulse, result)
    try:
        probe.run()
    except Exception as error:  # noqa: BLE001 - whatever a model, DeepSpeed or torch raises is this probe's outcome
        probe.fail(error)
        _write(result, spec)
        if result.peer_lost:
            time.sleep(PEER_GRACE_S)
        os._exit(1)
    _write(result, spec)


def _write(result: RankResult, spec: ProbeSpec) -> None:
    try:
        result.write(spec.directory)
    except OSError:
        traceback.print_exc()
        os._exit(CANNOT_WRITE)


class _Rank:
    """One rank's way through a probe."""

    def __init__(self, spec: ProbeSpec, rank: int, local_rank: int, pulse: Pulse, result: RankResult) -> None:
        self.spec, self.rank, self.local_rank = spec, rank, local_rank
        self.pulse, self.result = pulse, result
        self.world = spec.machine.world_size
        self.on_cpu = spec.machine.accelerator == "cpu"
        self.now = Phase.LOAD
        self.meters: Any = None
        self.steps_made = self.steps_counted = 0  # a skipped one is made and does not count
        self.losses: list[Any] = []
        self.norms: list[Any] = []
        self.began = self.joined = time.monotonic()

    # -- the way ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.place()
        import torch

        from autotune.probe.torchrun.meters import CpuMeters, CudaMeters
        from autotune.probe.torchrun.pace import pace

        self.join()
        self.mark("joined")
        if self.on_cpu:
            self.device = torch.device("cpu")
            self.meters = CpuMeters(self.spec.machine.device_memory_bytes, self.spec.offloaded_bytes)
        else:
            self.device = torch.device("cuda", self.local_rank)
            self.meters = CudaMeters(self.spec.machine.device_memory_bytes)
        with self.meters.taping():
            self.build()
            self.mark("built")
            self.initialise()
            self.mark("initialised")
            began = time.monotonic()
            self.taped_steps()
        self.meters.release()
        for _ in range(self.spec.warmup_steps - 1):
            self.unskipped_step(self.phase)
        self.check_losses()
        self.result.unmeasured_s = time.monotonic() - began
        self.mark("warm")
        self.measure()
        self.mark("measured")
        self.check_losses()
        self.finish()
        self.synchronise()
        self.result.pace_s = pace(self.device)
        self.synchronise()

    def place(self) -> None:
        """Give this rank its processors and threads: the same for every candidate, and recorded."""
        import torch

        sys.path.insert(0, self.spec.working_directory)
        processors = self.spec.processors[self.local_rank]
        if processors:
            os.sched_setaffinity(0, processors)
        torch.set_num_threads(self.spec.threads)
        os.environ.update(allocator_environment(self.spec.candidate))
        if not self.on_cpu:
            if torch.cuda._is_in_bad_fork():
                raise UnfitRank("the fork server has touched CUDA, so that its ranks cannot: use launcher=cold")
            if self.spec.devices is not None:  # CUDA reads it when it is first used, which comes next
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                names = visible.split(",") if visible else None
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[d] if names else str(d) for d in self.spec.devices)
            torch.cuda.set_device(self.local_rank)
        self.result.environment = {
            "threads": self.spec.threads,
            "processors": processors,
            "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", ""),
            "torch": torch.__version__,
        }

    def join(self) -> None:
        """Join the other ranks."""
        import deepspeed
        import torch.distributed as dist

        if self.on_cpu:
            shared_memory.check_room(self.spec.machine.devices_per_node)
        deepspeed.init_distributed(dist_backend="gloo" if self.on_cpu else "nccl", verbose=False)
        dist.barrier()
        self.joined = time.monotonic()
        shared_memory.unlink(self.rank)
        self.result.environment["deepspeed"] = deepspeed.__version__

    def build(self) -> None:
        """Load: the model on the device, or partitioned as it is born, with the weights that every candidate has."""
        import deepspeed
        import torch

        from autotune.workload.build import build_model, fill_weights
        from autotune.workload.checkpointing import apply_checkpointing

        spec, candidate = self.spec, self.spec.candidate
        place: Any = self.device
        if candidate.zero_stage == 3:
            self.phase(Phase.INIT)  # DeepSpeed reads the configuration here: what it refuses is refused, not a crash
            place = deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(spec.deepspeed_config))
        self.phase(Phase.LOAD)
        self.meters.begin()
        with torch.random.fork_rng(devices=[]):
            self.model, self.make_batch = build_model(spec.workload, candidate.precision, place)
        fill_weights(self.model, spec.workload.seed)
        self.targets = []
        if candidate.checkpoint_blocks != "none":
            self.targets = apply_checkpointing(
                self.model,
                candidate.checkpoint_blocks,
                candidate.checkpoint_part or "whole",
                candidate.checkpoint_input or "device",
            )
        self.record(Phase.LOAD)

    def initialise(self) -> None:
        """Init: DeepSpeed takes the model."""
        import deepspeed

        self.phase(Phase.INIT)
        self.meters.begin()
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=[p for p in self.model.parameters() if p.requires_grad],
            config=copy.deepcopy(self.spec.deepspeed_config),
        )
        self.meters.settle(self.engine)
        self.record(Phase.INIT)

    def taped_steps(self) -> None:
        """The first step, in which states are born and checkpointing is checked; then the steady one, per phase."""
        from autotune.workload.checkpointing import SavedBytes

        self.meters.begin()
        with SavedBytes(self.targets) as saved:
            self.unskipped_step(self.phase)
        self.meters.settle(self.engine)
        self.record("first_step")
        saved.check()

        open_phase: list[Phase] = []

        def on_phase(phase: Phase) -> None:
            if open_phase:
                self.record(open_phase.pop())
            open_phase.append(phase)
            self.phase(phase)
            self.meters.begin()

        self.unskipped_step(on_phase)
        self.record(open_phase.pop())

    def measure(self) -> None:
        """Time whole optimizer steps, synchronised at both ends."""
        spec, result = self.spec, self.result
        accumulation = spec.candidate.accumulation
        tokens = spec.candidate.micro_batch * accumulation * self.world * spec.workload.seq_len
        began = time.monotonic()
        for _ in range(spec.steps):
            if spec.sampled_accumulation:
                two, four = self.timed_step(2), self.timed_step(4)
                micro = (four - two) / 2
                result.step_times_s.append((accumulation - 1) * micro + two - micro)
            else:
                result.step_times_s.append(self.timed_step(accumulation))
            for name, size in self.meters.after_step().items():
                result.steps.setdefault(name, []).append(size)
            if len(result.step_times_s) >= 2 and self.cannot_win(tokens / min(result.step_times_s)):
                result.stopped = True
                break
        result.measured_s = time.monotonic() - began

    def timed_step(self, micro_steps: int) -> float:
        """Seconds of one unskipped optimizer step of so many micro-steps."""
        seconds: list[float] = []

        @contextmanager
        def timing() -> Iterator[None]:
            self.synchronise()
            start = time.perf_counter()
            yield
            self.synchronise()
            seconds.append(time.perf_counter() - start)

        self.unskipped_step(self.phase, micro_steps, timing)
        return seconds[-1]

    def cannot_win(self, best_tokens_per_s: float) -> bool:
        """Whether even 10 % better than its best step would not do; rank 0 decides for all."""
        if self.spec.stop_below_tokens_per_s is None:
            return False
        import torch
        import torch.distributed as dist

        hopeless = best_tokens_per_s * HOPE < self.spec.stop_below_tokens_per_s
        decision = torch.tensor([int(hopeless)], device=self.device)
        dist.broadcast(decision, src=0)
        return bool(decision.item())

    # -- its steps ----------------------------------------------------------------------------------------------

    def unskipped_step(
        self,
        on_phase: Callable[[Phase], None],
        micro_steps: int | None = None,
        timing: Callable[[], Any] = ExitStack,
    ) -> None:
        """Make one optimizer step that DeepSpeed does not skip: a skipped one allocates and computes too little."""
        from autotune.workload.build import make_step_batches
        from autotune.workload.step import optimizer_step

        for _ in range(MOST_SKIPPED):
            batches = make_step_batches(
                self.make_batch,
                self.spec.workload,
                self.steps_counted,  # so that the n-th step that counts has the same data in every candidate
                self.spec.candidate.micro_batch,
                micro_steps or self.spec.untimed_micro_steps,
                self.rank,
                self.world,
            )
            skipped = self.engine.skipped_steps
            with timing():
                loss = optimizer_step(self.engine, batches, self.device, on_phase)
            self.steps_made += 1
            if self.engine.skipped_steps == skipped:
                self.losses.append(loss)
                self.norms.append(self.engine.get_global_grad_norm())
                self.steps_counted += 1
                return
            self.result.skipped_steps += 1
            if not math.isfinite(loss.item()):  # a skipped step may wait for the device
                raise DivergedError(Phase.FORWARD, f"the loss of optimizer step {self.steps_made} is {loss.item()}")
        raise DivergedError(Phase.BACKWARD, f"DeepSpeed skipped {MOST_SKIPPED} steps in a row: gradients overflow")

    def synchronise(self) -> None:
        """Wait for the device, then for the other ranks."""
        import torch
        import torch.distributed as dist

        if not self.on_cpu:
            torch.cuda.synchronize()
        dist.barrier()

    def check_losses(self) -> None:
        """Average the losses so far over the ranks and refuse those that are no numbers.

        Raises:
            DivergedError: a loss is not finite.
        """
        import torch
        import torch.distributed as dist

        if not self.losses:
            return
        losses = torch.stack(self.losses).to(self.device)
        dist.all_reduce(losses)
        self.result.losses += [float(x) / self.world for x in losses.tolist()]
        self.result.gradient_norms += [None if norm is None else float(norm) for norm in self.norms]
        self.losses, self.norms = [], []
        for step, loss in enumerate(self.result.losses):
            if not math.isfinite(loss):
                raise DivergedError(Phase.FORWARD, f"the loss of optimizer step {step + 1} is {loss}")

    # -- its accounts -------------------------------------------------------------------------------------------

    def phase(self, phase: Phase) -> None:
        """Note what is going on, for this process and for whoever watches it."""
        self.now = phase
        self.pulse.phase(phase)

    def record(self, name: str) -> None:
        """Keep the record of a phase, the worst over its micro-steps."""
        record = self.meters.read()
        kept = self.result.memory.setdefault(str(name), record)
        for key, value in record.items():
            kept[key] = max(kept.get(key, 0), value)

    def mark(self, name: str) -> None:
        """Keep how long it took to come here, seconds."""
        self.result.timeline_s[name] = round(time.monotonic() - self.began, 4)

    def finish(self) -> None:
        """Read the meters once more: what the measured steps did to the allocator and to the host."""
        self.record("measured")
        self.result.at = time.monotonic() - self.joined

    def fail(self, error: Exception) -> None:
        """Say what went wrong, where, and what kind of outcome that is."""
        requested = requested_bytes(error)
        full = False
        if self.meters is not None:
            full = self.meters.full(requested)
            if self.meters.failed_at and requested:
                self.result.needed_bytes = self.meters.failed_at + requested
        self.result.failure = classify(error, self.now, full, self.on_cpu)
        self.result.peer_lost = self.result.failure == "crashed" and is_peer_lost(error)
        self.result.phase = str(error.phase if isinstance(error, DivergedError) else self.now)
        lines = str(error).strip().splitlines() or [""]
        self.result.message = f"{type(error).__name__}: {lines[0][:500]}".rstrip(": ")
        self.result.trace = traceback.format_exc()[-8000:]
        self.result.at = time.monotonic() - self.joined


if __name__ == "__main__":
    run(sys.argv[1])
