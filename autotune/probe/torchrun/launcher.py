"""The Launcher protocol, and what every launcher does alike: the ranks' environment, and a leash."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from autotune import credentials
from autotune.machine.machine import Machine
from autotune.probe.torchrun import preload
from autotune.workload.workload import Workload

START_S = 900.0
"""Importing and compiling may take so long, seconds: compiling for CUDA takes minutes."""

AgentReport = dict[str, Any]
Tell = Callable[[str], None]


class Launcher(Protocol):
    """Runs the ranks of one probe at a time."""

    name: str

    def describe(self, directory: Path) -> None:
        """Run autotune.probe.torchrun.describe on a directory."""
        ...

    def run(self, spec_path: Path, world: int, deadline_s: float) -> AgentReport:
        """Run a probe's ranks to their end or to the deadline; afterwards none of them is left.

        Returns:
            The agent's report (see agent.launch), with `timed_out`, `stopped` and `vanished` beside it (see watch.py).

        Raises:
            InfraError: the launcher's own processes could not be started.
        """
        ...

    def close(self) -> None:
        """End what is kept between probes."""
        ...


def environment(machine: Machine, workload: Workload, threads: int) -> dict[str, str]:
    """The environment of every rank: explicit where it changes what is measured."""
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # Compiled operations belong to one installation: paths and versions are compiled in.
    installation = hashlib.sha256(f"{sys.prefix} {metadata.version('torch')}".encode()).hexdigest()[:12]
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or str(
        Path.home() / ".cache" / "autotune" / "torch_extensions" / f"{metadata.version('deepspeed')}-{installation}"
    )
    return {
        **credentials.without(os.environ),
        # ninja, which compiles DeepSpeed's operations, is found beside this interpreter, activated or not: another
        # version of it would compile everything anew.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": machine.accelerator,
        "TORCH_EXTENSIONS_DIR": extensions,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        preload.MODEL_TYPE: workload.model.type,
        preload.OPTIMIZER: workload.optimizer.type,
    }


def leashed(command: list[str]) -> list[str]:
    """The command, made to die with this process."""
    return [sys.executable, "-m", "autotune.probe.torchrun.leash", str(os.getpid()), *command]
