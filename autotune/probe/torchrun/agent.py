"""torchrun's elastic agent for one probe: starts the ranks, ends them all when one fails, tells their exit codes.

As a program it is the cold launcher's torchrun: `python -m autotune.probe.torchrun.agent SPEC`.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autotune.probe.torchrun import worker
from autotune.probe.torchrun.spec import ProbeSpec
from autotune.process import adopt_orphans, end_orphans

SHUTDOWN_TIMEOUT_S = 2
"""Between SIGTERM and SIGKILL to ranks whose peer has failed: they have nothing left to do (torch's default is 30)."""


def launch(spec_path: str, start_method: str) -> dict[str, Any]:
    """Run one probe's ranks to their end.

    Args:
        spec_path: of the probe's spec.json.
        start_method: `forkserver` for ranks forked from a preloaded process, `spawn` for fresh ones.

    Returns:
        `exit_codes`: {rank: exit code, negative for a signal} of the ranks that failed by themselves, and
        `error`: what kept the agent from doing its work, or None.
    """
    spec = ProbeSpec.read(spec_path)
    logs = Path(spec.directory) / "logs"
    logs.mkdir(exist_ok=True)
    meeting = spec.rendezvous
    config = LaunchConfig(
        min_nodes=spec.machine.nodes,
        max_nodes=spec.machine.nodes,
        nproc_per_node=spec.machine.devices_per_node,
        run_id=meeting.identifier if meeting else uuid.uuid4().hex,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint if meeting else "localhost:0",
        # Told which node opens the store, the others never do, and a port that is taken is an error, not a stranger.
        rdzv_configs={"timeout": 60} | ({"is_host": meeting.first} if meeting else {}),
        local_addr=meeting.address if meeting else None,
        start_method=start_method,
        monitor_interval=0.05,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    entry: Callable[..., Any] | str = worker.run
    arguments: tuple[Any, ...] = (spec_path,)
    if start_method == "spawn":
        entry, arguments = sys.executable, ("-u", "-m", worker.__name__, spec_path)
    try:
        elastic_launch(config, entry)(*arguments)
    except ChildFailedError as error:
        return {"exit_codes": {rank: failure.exitcode for rank, failure in error.failures.items()}, "error": None}
    except Exception as error:  # noqa: BLE001 - the agent's own trouble (port, rendezvous) is told, not raised
        return {"exit_codes": {}, "error": f"{type(error).__name__}: {error}"}
    return {"exit_codes": {}, "error": None}


def main() -> None:
    """The cold launcher's program: one probe, its agent's report in `agent.json` of the run directory."""
    spec_path = sys.argv[1]
    adopt_orphans()
    report = launch(spec_path, "spawn")
    end_orphans(set())
    path = Path(spec_path).with_name("agent.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report))
    os.replace(part, path)


if __name__ == "__main__":
    main()
