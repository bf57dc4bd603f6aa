"""Looks at a workload's model without building it for real: how many parameters, which blocks.

`python -m autotune.probe.torchrun.describe DIRECTORY` reads `workload.json` there and writes `description.json`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.probe.torchrun.leash import die_with_parent
from autotune.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a model before it is probed.

    Attributes:
        parameters: their number; None where the model cannot be built without data (on torch's meta device).
        parameter_sizes: elements of each that is trained, in the model's order.
        blocks: how many alike blocks it has in a row; 0 for none.
        block_parameters: of the smallest block.
        not_checkpointed: why, for each `blocks/part` (as in `half/mlp`) that cannot be checkpointed.
        source: a digest of the file that a custom model's factory is written in.
        error: why it cannot be trained at all: the factory cannot be imported, the type is unknown.
    """

    parameters: int | None = None
    parameter_sizes: list[int] = field(default_factory=list)
    blocks: int = 0
    block_parameters: int = 0
    not_checkpointed: dict[str, str] = field(default_factory=dict)
    source: str | None = None
    error: str | None = None


def describe(workload: Workload) -> Description:
    """Build the model on torch's meta device and look at it."""
    import torch

    from autotune.workload.build import FactoryError, build_model, load_factory

    source = None
    try:
        if workload.model.factory:
            path = inspect.getsourcefile(load_factory(workload.model.factory))
            source = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else None
        model, _ = build_model(workload, workload.precision, torch.device("meta"))
    except FactoryError as error:
        return Description(error=str(error))
    except Exception as error:  # noqa: BLE001 - a custom model may need real data to be built: a probe will tell
        if workload.model.factory:
            return Description(source=source)
        return Description(error=f"transformers cannot build model.type={workload.model.type}: {error}")
    blocks = [sum(p.numel() for p in block.parameters()) for block in _blocks(model)]
    return Description(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_sizes=[parameter.numel() for parameter in model.parameters() if parameter.requires_grad],
        blocks=len(blocks),
        block_parameters=min(blocks, default=0),
        not_checkpointed=_not_checkpointed(model),
        source=source,
    )


def _blocks(model: Any) -> list[Any]:
    from autotune.workload.checkpointing import CheckpointingError, find_blocks

    try:
        return find_blocks(model)[1]
    except CheckpointingError:
        return []


def _not_checkpointed(model: Any) -> dict[str, str]:
    from autotune.workload.checkpointing import PARTS, SHARES, CheckpointingError, find_targets

    reasons = {}
    for share in SHARES.keys() - {"none"}:
        for part in PARTS:
            try:
                find_targets(model, share, part)
            except CheckpointingError as error:
                reasons[f"{share}/{part}"] = str(error)
    return reasons


def main(directory: str) -> None:
    """Describe the workload in a directory's `workload.json`."""
    die_with_parent()
    folder = Path(directory)
    asked = json.loads((folder / "workload.json").read_text())
    sys.path.insert(0, asked["working_directory"])
    description = describe(Workload.from_dict(asked["workload"]))
    part = folder / "description.part"
    part.write_text(json.dumps(asdict(description)))
    os.replace(part, folder / "description.json")


if __name__ == "__main__":
    main(sys.argv[1])
