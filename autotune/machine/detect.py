"""What is here: the NVIDIA devices that NVML lists, the processor, the host's memory and cores."""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from autotune.errors import SettingsError
from autotune.machine.machine import GIB, Machine

MEMORY_TOLERANCE = 0.02
"""How much more memory than the device here has a machine may name: figures of the catalogue differ by driver."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA device as NVML describes it.

    Attributes:
        product: the name that CUDA and torch give it too.
        uuid: what CUDA_VISIBLE_DEVICES may call it.
        memory_bytes: what a process can use: the total without what the driver keeps for itself.
        driver: version of the driver.
    """

    product: str
    uuid: str
    memory_bytes: int
    driver: str


def register_resolver(catalogue: Path) -> None:
    """Give conf/machine its `${detect:auto,FIELD}` and `${detect:cpu,FIELD}`.

    Detection runs when such a field is read, so a field that the user overrides is never asked for.

    Args:
        catalogue: the folder conf/machine.
    """

    def detect(config: str, field: str, *, _root_: DictConfig) -> Any:
        if config == "cpu":
            return processor()[field]
        published_on = OmegaConf.select(_root_, "model.published_on")
        if published_on and not visible_gpus():
            return published(catalogue, published_on, _root_.model.published_nodes)[field]
        return this_machine(catalogue)[field]

    OmegaConf.register_new_resolver("detect", detect, replace=True)


def this_machine(catalogue: Path) -> dict[str, Any]:
    """The machine here, as the fields of a Machine: its GPUs, or the `cpu` of the catalogue where there are none.

    A device that the catalogue knows by its product name takes bandwidths and peak rates from there; its memory, the
    host's memory, the cores and the driver are those found here.

    Raises:
        SettingsError: the devices here cannot be read, or differ from each other.
    """
    gpus = visible_gpus()
    if not gpus:
        return Machine().to_dict() | _read(catalogue / "cpu.yaml") | processor()
    products = Counter(gpu.product for gpu in gpus)
    if len(products) > 1:
        raise SettingsError(
            f"the devices here differ: {', '.join(f'{count} × {product}' for product, count in products.items())}",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    gpu = gpus[0]
    found = {
        "accelerator": "cuda",
        "device": gpu.product,
        "nodes": 1,
        "devices_per_node": len(gpus),
        "device_memory_gib": round(min(gpu.memory_bytes for gpu in gpus) / GIB, 1),
        "driver": gpu.driver,
    }
    return Machine().to_dict() | _catalogued(catalogue, gpu.product) | found | _host()


def published(catalogue: Path, name: str, nodes: int) -> dict[str, Any]:
    """The machine that a model was published on, as the fields of a Machine."""
    return Machine().to_dict() | _read(catalogue / f"{name}.yaml") | {"nodes": nodes}


def processor() -> dict[str, Any]:
    """The processor here, as the fields of a Machine that it decides."""
    return {"device": processor_name(), **_host()}


def processor_name() -> str:
    """The processor's model name, e.g. `AMD EPYC 9654 96-Core Processor`; its architecture where that is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def visible_gpus() -> list[Gpu]:
    """The NVIDIA devices that CUDA would show to a process started here, in its order.

    Raises:
        SettingsError: there are devices, and NVML's Python binding is missing or fails.
    """
    gpus = nvml_gpus()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    visible: list[Gpu] = []
    for name in (part.strip() for part in wanted.split(",")):
        if name.isdecimal() and int(name) < len(gpus):
            visible.append(gpus[int(name)])
        elif name.startswith("GPU-") and (matches := [gpu for gpu in gpus if gpu.uuid.startswith(name)]):
            visible.append(matches[0])
        else:
            break  # as CUDA does: the first name it does not know ends the list
    return visible


@cache
def nvml_gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA device of this host.

    Raises:
        SettingsError: there are devices, and NVML's Python binding is missing or fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the package `pynvml`, which hides that of nvidia-ml-py
            import pynvml
    except ImportError:
        if Path("/dev/nvidiactl").exists():
            raise SettingsError(
                "there is an NVIDIA driver here, and nvidia-ml-py to ask it is not installed",
                "pip install nvidia-ml-py, or name a machine: machine=cpu, or one of the catalogue in conf/machine",
            ) from None
        return ()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise _unreadable(error) from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(pynvml, handle, driver) for handle in handles)
    except pynvml.NVMLError as error:
        raise _unreadable(error) from error
    finally:
        pynvml.nvmlShutdown()


def is_here(machine: Machine) -> bool:
    """Whether probes for this machine can run on the machine here."""
    return not not_here_reason(machine)


def not_here_reason(machine: Machine) -> str:
    """Why this machine is not the machine here, one sentence; empty where it is.

    Raises:
        SettingsError: the devices here cannot be read.
    """
    if machine.accelerator != "cpu" and not visible_gpus():
        return f"machine={machine.name} has {machine.device} devices, and no GPU is visible here"
    if machine.nodes > 1:
        reach = "launcher=slurm and launcher=hosts reach more"
        return f"machine={machine.name} has {machine.nodes} nodes, and this is one ({reach})"
    if machine.accelerator == "cpu":
        if machine.device == processor_name():
            return ""
        return f"machine={machine.name} has the processor '{machine.device}', and here is '{processor_name()}'"
    gpus = visible_gpus()
    if products := {gpu.product for gpu in gpus} - {machine.device}:
        return f"machine={machine.name} has {machine.device} devices, and here is {', '.join(sorted(products))}"
    if machine.devices_per_node > len(gpus):
        return f"machine={machine.name} has {machine.devices_per_node} devices per node, and here are {len(gpus)}"
    memory = min(gpu.memory_bytes for gpu in gpus) / GIB
    if machine.device_memory_gib > memory * (1 + MEMORY_TOLERANCE):
        return f"machine={machine.name} has {machine.device_memory_gib:.2f} GiB a device, and here are {memory:.2f} GiB"
    return ""


def _gpu(pynvml: Any, handle: Any, driver: str) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return Gpu(
        product=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(memory.total) - int(memory.reserved),
        driver=driver,
    )


def _unreadable(error: Exception) -> SettingsError:
    return SettingsError(
        f"the NVIDIA devices here cannot be read: {error}",
        "see whether nvidia-smi runs, or name a machine: machine=cpu, or one of the catalogue in conf/machine",
    )


def _catalogued(catalogue: Path, product: str) -> dict[str, Any]:
    """The catalogue's fields for a product; for an unknown one a name made from it."""
    for path in sorted(catalogue.glob("*.yaml")):
        entry = _read(path)
        if entry.get("device") == product:
            return entry
    return {"name": re.sub(r"[^a-z0-9]+", "_", product.lower()).strip("_")}


def _read(path: Path) -> dict[str, Any]:
    """A machine config as it is written, interpolations unresolved."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _host() -> dict[str, Any]:
    """Memory (whole GiB: the kernel's own share differs a little between boots) and cores of the host here."""
    memory = min([psutil.virtual_memory().total, *_memory_limits()])
    return {"host_memory_gib": float(memory // GIB), "cores": len(os.sched_getaffinity(0))}


def _memory_limits() -> list[int]:
    """The limits in bytes that control groups (version 2) put on this process."""
    group = Path("/proc/self/cgroup")
    lines = group.read_text().splitlines() if group.exists() else []
    root = Path("/sys/fs/cgroup")
    limits = []
    for line in lines:
        if line.startswith("0::/"):
            path = root / line.removeprefix("0::/")
            files = [folder / "memory.max" for folder in (path, *path.parents) if folder.is_relative_to(root)]
            limits += [int(text) for file in files if file.exists() and (text := file.read_text().strip()) != "max"]
    return limits
