"""When a measurement may stand for another: a hash of everything that matters to what is measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.workload.workload import Workload


def reuse_key(
    candidate: Candidate,
    workload: Workload,
    machine: Machine,
    probe_kind: str,
    launcher: str,
    protocol: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> str:
    """64 hexadecimal digits that are equal exactly when two measurements were made under the same conditions.

    Args:
        candidate: what was run.
        workload: what was trained, names of models included.
        machine: by its fingerprint, so that headroom does not count.
        probe_kind: `torchrun`, `virtual` or `table`.
        launcher: `warm`, `cold`, …
        protocol: warm-up, steps, and whether it was a confirmation.
        environment: versions (driver and NCCL too), thread and allocator settings, a digest of the factory's source.
    """
    conditions = {
        "candidate": candidate.to_dict(),
        "workload": workload.to_dict(),
        "machine": machine.fingerprint,
        "probe_kind": probe_kind,
        "launcher": launcher,
        "protocol": dict(protocol),
        "environment": dict(environment),
    }
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
