"""What a candidate needs at the very least, in memory and of its model: it says what cannot run, never what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autotune.candidate import Candidate
from autotune.machine.machine import GIB, Machine, gib
from autotune.workload.workload import Workload

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def least_device_bytes(candidate: Candidate, parameters: int, workload: Workload, machine: Machine) -> int:
    """Bytes that one device must hold in any case: parameters and optimizer states, as far as they stay on it.

    Gradients, buffers and activations come on top and are left out: this is a bound from below. Sizes per parameter
    are those of mixed precision training (ZeRO, arXiv:1910.02054, section 3.1).
    """
    stage, world = candidate.zero_stage, machine.world_size
    held = 0.0
    if candidate.offload_param is None:
        held += _BYTES[candidate.precision] / (world if stage == 3 else 1)
    if candidate.offload_optimizer is None:
        held += _states(candidate, workload) / (world if stage >= 1 else 1)
    return int(parameters * held)


def least_host_bytes(candidate: Candidate, parameters: int, workload: Workload, machine: Machine) -> int:
    """Bytes that the memory of one node must hold in any case: what is offloaded to it, and emulated devices."""
    share = 1 / machine.nodes
    held = 0.0
    if candidate.offload_param == "cpu":
        held += _BYTES[candidate.precision] * share
    if candidate.offload_optimizer == "cpu":
        # beside the states DeepSpeed keeps an fp32 gradient, and a buffer of the parameters' own precision
        held += (_states(candidate, workload) + 4 + _BYTES[candidate.precision]) * share
    devices = 0
    if machine.accelerator == "cpu":
        devices = machine.devices_per_node * least_device_bytes(candidate, parameters, workload, machine)
    return int(parameters * held) + devices


def _states(candidate: Candidate, workload: Workload) -> int:
    """Bytes of optimizer states per parameter: an fp32 master beside 16-bit parameters, and Adam's two moments."""
    moments = 8 if "adam" in workload.optimizer.type.lower() else 0
    return moments + (4 if candidate.precision != "fp32" else 0)


def impossibility(
    candidates: Iterable[Candidate],
    parameters: int | None,
    not_checkpointed: Mapping[str, str],
    workload: Workload,
    machine: Machine,
) -> Callable[[Candidate], str | None]:
    """Says of a candidate why it cannot run on a machine at all, in a sentence; None where it may.

    Args:
        candidates: the sentence names the least that one of those needs which cannot run for that reason.
        parameters: of the model; None where that is not known, and then memory rules nothing out.
        not_checkpointed: why the model's blocks cannot be checkpointed so, by `blocks/part`.
        workload: decides what the optimizer keeps.
        machine: what there is.
    """
    limits = [
        ("per device", least_device_bytes, machine.device_memory_bytes),
        ("of host memory per node", least_host_bytes, int(machine.host_memory_gib * GIB)),
    ]

    def excess(candidate: Candidate) -> tuple[str, int, int] | None:
        """Where the candidate needs more than there is, what it needs there, and what there is."""
        for where, least, have in limits:
            need = least(candidate, parameters or 0, workload, machine)
            if have and need > have:
                return where, need, have
        return None

    least: dict[str, int] = {}
    for found in filter(None, map(excess, candidates)):
        least[found[0]] = min(found[1], least.get(found[0], found[1]))

    def reason(candidate: Candidate) -> str | None:
        found = excess(candidate)
        if found is None:
            return not_checkpointed.get(f"{candidate.checkpoint_blocks}/{candidate.checkpoint_part}")
        where, need, have = found
        return (
            f"parameters and optimizer states ({(parameters or 0) / 1e9:,.2f} billion parameters) need at least "
            f"{gib(least.get(where, need))} {where}, and machine={machine.name} has {gib(have)}"
        )

    return reason
