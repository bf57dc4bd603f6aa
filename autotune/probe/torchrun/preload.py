"""What must have happened before a rank starts quickly: everything imported, DeepSpeed's C++ operations compiled.

The warm launcher's fork server imports this module once (`FORK_SERVER` is set there); as a program it compiles, for the
cold launcher and for CUDA. No tensor operation runs here and CUDA is not touched: a forked rank could not use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORK_SERVER = "AUTOTUNE_FORK_SERVER"
MODEL_TYPE = "AUTOTUNE_MODEL_TYPE"
OPTIMIZER = "AUTOTUNE_OPTIMIZER"
STATUS_FILE = "AUTOTUNE_STATUS_FILE"

_OPS = {"adam": ("FusedAdamBuilder", "CPUAdamBuilder"), "lion": ("FusedLionBuilder", "CPULionBuilder")}


def tell(status: str) -> None:
    """Say what is going on to whoever waits, in the file that the environment names."""
    if path := os.environ.get(STATUS_FILE):
        Path(path).write_text(status)


def prepare(operations: bool) -> None:
    """Import what ranks import, then compile and load DeepSpeed's operations where asked to."""
    tell("importing torch, DeepSpeed and transformers")
    with _processor_asked_once():
        for module in (
            "deepspeed",
            "deepspeed.runtime.zero.muon.muon_optimizer",  # imports torch's compiler, which DeepSpeed does late
            "torch._inductor.compile_fx",
            "transformers.models.auto.modeling_auto",
            "autotune.probe.torchrun.worker",
            "autotune.probe.torchrun.meters",
            "autotune.probe.torchrun.pace",
            "autotune.workload.build",
            "autotune.workload.checkpointing",
            "autotune.workload.step",
        ):
            importlib.import_module(module)
        if model_type := os.environ.get(MODEL_TYPE):
            with contextlib.suppress(ImportError):  # a type whose module has another name is imported by the ranks
                importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    with _compiling() if operations else contextlib.nullcontext():
        for builder in _builders() if operations else []:
            name = builder().name
            compiled = (_build_directory(name) / f"{name}.so").exists()
            tell(f"loading DeepSpeed's {name}" if compiled else f"compiling DeepSpeed's {name}, once (about a minute)")
            builder().load(verbose=False)
    tell("ready")


@contextlib.contextmanager
def _processor_asked_once() -> Iterator[None]:
    """DeepSpeedCPUAdam asks for the processor's name at every start; the programs that know it take a second.

    They are run beside what is done here, and every rank has their answer.
    """
    import cpuinfo

    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(cpuinfo.get_cpu_info)
        yield
    answer = asked.result()
    cpuinfo.get_cpu_info = lambda: dict(answer)


def _builders() -> list[Callable[[], Any]]:
    """The builders of the operations that probes use on this accelerator, as far as they can be built here."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind = os.environ.get(OPTIMIZER, "adamw").lower()
    names = [name for family, ops in _OPS.items() if kind.startswith(family) for name in ops]
    if accelerator.device_name() == "cpu":
        names.append("ShareMemCommBuilder")
    builders = [accelerator.get_op_builder(name) for name in names]
    return [b for b in builders if b is not None and hasattr(b, "NAME") and b().is_compatible(verbose=False)]


def _build_directory(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let one process compile at a time, whatever became of the others.

    torch waits forever for a lock file that a killed compiler left behind; the lock here is the kernel's, so whoever
    holds it may remove torch's.
    """
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    root.mkdir(parents=True, exist_ok=True)
    with (root / "autotune.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in root.glob("*/lock"):
            stale.unlink()
        yield


if os.environ.get(FORK_SERVER):
    from autotune.probe.torchrun.leash import die_with_parent

    die_with_parent()
    # For CUDA, compiling asks the devices for their architecture, after which a forked rank could not use them.
    prepare(operations=os.environ.get("DS_ACCELERATOR") == "cpu")

if __name__ == "__main__":
    prepare(operations=True)
