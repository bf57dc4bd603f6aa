"""The winner as files: `deepspeed_config.json`, which DeepSpeed takes as it is, and `recipe.json` beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.candidate import Candidate
from autotune.export.files import write_json
from autotune.machine.machine import Machine
from autotune.probe.measurement import PLANNED, Measurement
from autotune.report.notes import remarks
from autotune.search.referee import PARITY
from autotune.space.config import allocator_environment, deepspeed_config
from autotune.store.records import ProbeRecord
from autotune.workload.workload import Workload

CONFIG_FILE = "deepspeed_config.json"
RECIPE_FILE = "recipe.json"
SCHEMA = 1

UNIVERSAL_CHECKPOINT = (
    "Changing the ZeRO stage or the number of devices in the middle of a training needs a universal checkpoint: "
    "convert the last one with DeepSpeed's ds_to_universal.py and load it with checkpoint.load_universal. "
    "Otherwise optimizer states do not load, or load wrongly."
)
ACCUMULATION = (
    "The config has no train_batch_size, so that it loads on any number of devices; on another number than this "
    "machine's, set gradient_accumulation_steps so that micro-batch × accumulation × devices is the global batch."
)
PREDICTED = "This candidate was predicted, not measured: run it before you rely on it."

_NOT_VERSIONS = {"threads", "processors"}


def write_winner(
    record: ProbeRecord, workload: Workload, machine: Machine, directory: Path, nvme_path: str | None = None
) -> list[Path]:
    """Write both files of a probe, each of them whole or not at all.

    Args:
        record: the probe of the winner, or of any other trial that is exported.
        workload: of its study.
        machine: of its study.
        directory: made where it is missing.
        nvme_path: `space.nvme_path`, for a candidate that offloads to nvme.

    Returns:
        The paths of `deepspeed_config.json` and `recipe.json`.

    Raises:
        SettingsError: the files cannot be written, or the candidate needs nvme_path.
    """
    config = deepspeed_config(record.candidate, workload, machine, nvme_path)
    return [
        write_json(directory / CONFIG_FILE, config),
        write_json(directory / RECIPE_FILE, recipe(record, workload, machine)),
    ]


def recipe(record: ProbeRecord, workload: Workload, machine: Machine) -> dict[str, Any]:
    """Everything about a winner that its DeepSpeed config does not say."""
    candidate, measurement = record.candidate, record.measurement
    predicted = [PREDICTED] if measurement.predicted else []
    return {
        "schema": SCHEMA,
        "autotune": __version__,
        "status": PLANNED if measurement.predicted else "measured",
        "study": record.study,
        "trial": record.trial,
        "key": record.key,
        "created": record.created,
        "candidate": candidate.to_dict(),
        "global_batch": candidate.micro_batch * candidate.accumulation * machine.world_size,
        "checkpointing": checkpointing_plan(candidate),
        "environment": environment(candidate, measurement),
        "use": use(candidate, machine),
        "warnings": [*predicted, *remarks(measurement), UNIVERSAL_CHECKPOINT, ACCUMULATION],
        "parity": measurement.detail.get(PARITY),
        "measurement": measurement_summary(measurement, machine),
        "versions": {
            name: value
            for name, value in measurement.environment.items()
            if not name.isupper() and name not in _NOT_VERSIONS
        },
        "machine": {**machine.to_dict(), "fingerprint": machine.fingerprint},
        "workload": workload.to_dict(),
    }


def checkpointing_plan(candidate: Candidate) -> dict[str, str] | None:
    """Which activations are recomputed; None for none. DeepSpeed's config cannot say it: the model must do it."""
    if candidate.checkpoint_blocks == "none":
        return None
    return {
        "blocks": candidate.checkpoint_blocks,
        "part": candidate.checkpoint_part or "whole",
        "input": candidate.checkpoint_input or "device",
    }


def environment(candidate: Candidate, measurement: Measurement) -> dict[str, str]:
    """The environment variables that the measurement had, to be set before Python starts.

    A prediction has run nowhere: only the candidate's own are left.
    """
    measured = {} if measurement.predicted else measurement.environment
    variables = {name: str(value) for name, value in measured.items() if name.isupper() and value}
    if "threads" in measured:
        variables["OMP_NUM_THREADS"] = str(measured["threads"])
    return {**allocator_environment(candidate), **variables}


def use(candidate: Candidate, machine: Machine) -> dict[str, str]:
    """How a training script takes the two files, as lines of code."""
    nodes = f"--nnodes {machine.nodes} " if machine.nodes > 1 else ""
    lines = {
        "launch": f"torchrun {nodes}--nproc-per-node {machine.devices_per_node} train.py",
        "config": f'deepspeed.initialize(model=model, model_parameters=model.parameters(), config="{CONFIG_FILE}")',
    }
    if candidate.garbage_collection_threshold is not None:
        lines["allocator"] = "torch.cuda.set_per_process_memory_fraction(1.0)  # garbage collection needs it"
    plan = checkpointing_plan(candidate)
    if plan:
        arguments = ", ".join(f'"{value}"' for value in plan.values())
        lines["checkpointing"] = (
            "from autotune.workload.checkpointing import apply_checkpointing; "
            f"apply_checkpointing(model, {arguments})  # before deepspeed.initialize"
        )
    return lines


def measurement_summary(measurement: Measurement, machine: Machine) -> dict[str, Any]:
    """What was measured, in the store's units, with its spread; or the whole prediction."""
    rate = measurement.tokens_per_s
    used = measurement.used_bytes
    return {
        "probe_kind": measurement.probe_kind,
        "outcome": measurement.outcome.value,
        "tokens_per_s": rate,
        "tokens_per_s_low": measurement.tokens_per_s_low,
        "tokens_per_s_high": measurement.tokens_per_s_high,
        "tokens_per_s_per_device": rate / machine.world_size if rate is not None else None,
        "step_s": measurement.step_s,
        "steps": len(measurement.step_times_s),
        "peak_allocated_bytes": measurement.peak_allocated_bytes,
        "peak_reserved_bytes": measurement.peak_reserved_bytes,
        "device_total_bytes": measurement.device_total_bytes,
        "device_memory_share": used / machine.device_memory_bytes if used else None,
        "host_peak_bytes": measurement.host_peak_bytes,
        "worst_rank": measurement.worst_rank,
        **({"prediction": measurement.detail.get("prediction")} if measurement.predicted else {}),
    }
