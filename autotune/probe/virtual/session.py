"""One job in its own process: the engine on its device, then each run in a fork of it, each with its tape."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import torch

from autotune.candidate import Candidate
from autotune.probe.torchrun.meters import host_storages
from autotune.probe.virtual import device, headroom, kernels, world
from autotune.probe.virtual.compute import NotTraceable, VirtualRecorder, reads_memory
from autotune.probe.virtual.engine import Engine
from autotune.probe.virtual.job import Job, failure_of, write_error
from autotune.probe.virtual.recorder import OverBudget
from autotune.probe.virtual.replay import outside_bytes
from autotune.probe.virtual.scope import Scope
from autotune.probe.virtual.tape import Place, TapeWriter
from autotune.workload.checkpointing import CheckpointingError, HostInput, find_blocks
from autotune.workload.phase import Phase


class Session:
    """What a job's runs share.

    Args:
        job: what is to be traced.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        writer = TapeWriter()
        self.recorder = VirtualRecorder(writer, Scope(writer))
        self.now = "load"
        self._reached = mmap.mmap(-1, 1)  # shared with the forks, which may die without a word

    @property
    def reached(self) -> str:
        """The phase that this process or the last of its forks has reached."""
        return str(list(Phase)[self._reached[0]])

    def start(self) -> None:
        """Build the model and initialise DeepSpeed."""
        job, recorder = self.job, self.recorder
        recorder.on_phase = lambda index: self._reached.__setitem__(0, index)
        kernels.replace_deepspeed_operations(recorder)
        device.adapt_torch()
        if job.machine.accelerator == "cpu":
            world.hold_as_gloo()
            place = torch.device("cpu")
            recorder.host_is_device = True
            HostInput.ledger = recorder.expect_host
        else:
            recorder.budget = job.machine.device_memory_bytes - outside_bytes(job.machine)
            HostInput.current = classmethod(lambda cls: cls(pin_memory=True))  # type: ignore[method-assign,assignment]
            device.register()
            kernels.use_cuda_kernels(job.machine.device)
            place = device.use_virtual_device(job.rank, job.machine, recorder)
        world.join_world(job.rank, job.machine)
        recorder.slice_quickly()
        headroom.watch(recorder.writer.facts)
        first = job.runs[0][0]
        self.engine = Engine(job.workload, job.machine, job.deepspeed_config, job.rank, place, recorder)
        # Garbage is collected between steps only, so that a storage in a cycle dies at the same point every time.
        gc.disable()
        try:
            with recorder:
                self.engine.build(first.zero_stage, first.precision, fill=False)
                recorder.writer.facts |= self._facts()
                self.engine.initialise()
        except OverBudget:
            recorder.writer.facts["cut"] = True
        finally:
            self.now = self.engine.now

    def run(self, candidate: Candidate, path: str) -> None:
        """Two optimizer steps of a candidate, to a tape file."""
        writer = self.recorder.writer

        def escape(error: Exception) -> None:
            self.now = self.engine.now
            if isinstance(error, OverBudget):
                writer.facts["cut"] = True
                self._save(path)
            else:
                write_error(path, failure_of(error, str(self.now)))
            os._exit(0)

        self.recorder.escape = escape
        if "cut" not in writer.facts:
            try:
                with self.recorder:
                    self.engine.checkpoint(candidate)
                    for _ in range(2):
                        gc.collect()
                        self.engine.step(candidate.micro_batch, self.job.micro_steps)
            except OverBudget:
                writer.facts["cut"] = True
            except RuntimeError as error:
                if (wanted := reads_memory(error)) is None:
                    raise
                module = writer.text(self.recorder.scope.where(error)) or "the model"
                raise NotTraceable(f"{wanted} in {module} (tensors have no memory here to be read)") from error
            finally:
                self.now = self.engine.now
        self._save(path)

    def _save(self, path: str) -> None:
        tape = self.recorder.writer.tape()
        if self.recorder.host_is_device and hasattr(self.engine, "engine"):
            owned = {self.recorder.ident_of(storage) for storage in host_storages(self.engine.engine)}
            tape.rows["place"][[int(i) in owned for i in tape.rows["ident"]]] = Place.HOST
        part = Path(path).with_suffix(f".{os.getpid()}.npz")
        tape.save(part)
        os.replace(part, path)

    def _facts(self) -> dict[str, object]:
        model = self.engine.model
        try:
            name, blocks = find_blocks(model)
        except CheckpointingError:
            name, blocks = "", []
        sizes = [int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad]
        return {"blocks": name, "depth": len(blocks), "parameters": sizes}
