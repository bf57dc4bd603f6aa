"""One rank of a training on virtual devices, from building the model to its second optimizer step, onto a tape.

The engine is DeepSpeed's own, and the step is the one that real ranks run (autotune/workload/step.py).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.virtual.recorder import Recorder
from autotune.probe.virtual.roles import COMMUNICATION, GRADIENTS, PARAMETERS, roles, tensors_in
from autotune.workload.build import build_model, fill_weights, make_step_batches
from autotune.workload.checkpointing import apply_checkpointing
from autotune.workload.phase import Phase
from autotune.workload.step import optimizer_step
from autotune.workload.workload import Workload

FIRST_STEP = "first_step"


class Engine:
    """One rank's training. Call `build`, `initialise` and then `step` twice, with the recorder active.

    Args:
        workload, machine: what is trained, and where.
        deepspeed_config: what DeepSpeed gets.
        rank: which rank.
        device: where its tensors are.
        recorder: writes the tape.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        deepspeed_config: dict[str, Any],
        rank: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.workload, self.machine, self.config, self.rank = workload, machine, deepspeed_config, rank
        self.device, self.recorder = device, recorder
        self.now = Phase.LOAD
        self.steps = 0

    def build(self, zero_stage: int, precision: str, fill: bool) -> None:
        """Load: the model on the device, or partitioned as it is born.

        Args:
            zero_stage: of ZeRO.
            precision: of the parameters.
            fill: give the parameters values, as real probes do.
        """
        import deepspeed

        self._phase(Phase.LOAD)
        place: Any = self.device
        if zero_stage == 3:
            self.now = Phase.INIT  # DeepSpeed reads the configuration here
            place = deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(self.config))
            self.now = Phase.LOAD
        with torch.random.fork_rng(devices=[]):
            self.model, self.make_batch = build_model(self.workload, precision, place)
        if fill:
            fill_weights(self.model, self.workload.seed)
        self.recorder.scope.follow(self.model)
        for parameter in self.model.parameters():
            self.recorder.role(parameter, PARAMETERS)
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call] # untyped
        if zero_stage == 3:
            for module in self.model.modules():
                if module._parameters:
                    module.register_forward_hook(self._used)

    def checkpoint(self, candidate: Candidate) -> None:
        """Have the candidate's blocks recompute."""
        if candidate.checkpoint_blocks != "none":
            part, where = candidate.checkpoint_part or "whole", candidate.checkpoint_input or "device"
            apply_checkpointing(self.model, candidate.checkpoint_blocks, part, where)

    def initialise(self) -> None:
        """Init: DeepSpeed takes the model."""
        import deepspeed

        self._phase(Phase.INIT)
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=[p for p in self.model.parameters() if p.requires_grad],
            config=copy.deepcopy(self.config),
        )
        self.label()

    def step(self, micro_batch: int, micro_steps: int) -> None:
        """One optimizer step; the first is one phase, those after it have the phases of training."""
        with self.recorder.silence():  # a real training has its own way to its data
            batches = make_step_batches(
                self.make_batch, self.workload, self.steps, micro_batch, micro_steps, self.rank, self.machine.world_size
            )
        micro_step = 0

        def on_phase(phase: Phase) -> None:
            nonlocal micro_step
            micro_step += phase is Phase.FORWARD
            self.now = phase
            self.recorder.phase(phase if self.steps else FIRST_STEP, micro_step, phase)

        optimizer_step(self.engine, batches, self.device, on_phase)
        self.recorder.scope.forget()
        self.steps += 1
        self.label()

    def _accumulated(self, parameter: torch.nn.Parameter) -> None:
        """Say what is there only while backward runs: gradients, gathered parameters, buckets of stages 1 and 2."""
        if parameter.grad is not None:
            self.recorder.role(parameter.grad, GRADIENTS)
        self.recorder.role(parameter, PARAMETERS)
        for bucket in getattr(self.engine.optimizer, "ipg_buckets", {}).values():
            for buffer in tensors_in(bucket.buffer):
                self.recorder.role(buffer, COMMUNICATION)

    def _used(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Say what is there only while a module is called: gathered parameters."""
        for parameter in module._parameters.values():
            if parameter is not None:
                self.recorder.role(parameter, PARAMETERS)

    def label(self) -> None:
        """Say what the storages that DeepSpeed holds now are."""
        for role, tensors in roles(self.engine).items():
            for tensor in tensors:
                self.recorder.role(tensor, role)

    def _phase(self, phase: Phase) -> None:
        self.now = phase
        self.recorder.phase(phase, 0, phase)
