"""What is here, with the devices that NVML would list put in its place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from autotune.errors import SettingsError
from autotune.machine import detect
from autotune.machine.detect import Gpu, is_here, not_here_reason, this_machine, visible_gpus
from autotune.machine.machine import GIB, Machine
from autotune.settings import config_dir, register_schema

CATALOGUE = config_dir() / "machine"


def gpus(product: str = "NVIDIA H200", count: int = 8, gib: float = 139.81) -> tuple[Gpu, ...]:
    return tuple(Gpu(product, f"GPU-{index:04d}-aaaa", int(gib * GIB), "570.86.15") for index in range(count))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with the devices that shall be here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def place(*devices: Gpu) -> None:
        monkeypatch.setattr(detect, "nvml_gpus", lambda: devices)

    place()
    return place


def detected() -> Machine:
    return Machine.from_dict(this_machine(CATALOGUE))


def composed(config: str, **overrides: Any) -> Machine:
    register_schema()
    loaded = OmegaConf.load(CATALOGUE / f"{config}.yaml")
    machine = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Machine), loaded, overrides))
    assert isinstance(machine, Machine)
    return machine


def test_without_a_gpu_the_machine_is_the_cpu_config(here: Any) -> None:
    assert composed("auto") == composed("cpu") == detected()
    assert detected().name == "cpu"
    assert detected().accelerator == "cpu"


def test_the_processor_its_memory_and_cores_are_found(here: Any) -> None:
    machine = composed("cpu")
    assert machine.device
    assert machine.host_memory_gib >= 1
    assert machine.host_memory_gib == int(machine.host_memory_gib)
    assert machine.cores >= 1


def test_the_fingerprint_is_the_same_each_time(here: Any) -> None:
    assert composed("cpu").fingerprint == composed("cpu").fingerprint


def test_a_known_card_takes_its_rates_from_the_catalogue_and_its_memory_from_the_device(here: Any) -> None:
    here(*gpus(gib=100.04))
    machine = detected()
    assert (machine.name, machine.device, machine.accelerator) == ("h200_141g", "NVIDIA H200", "cuda")
    assert machine.peak_tflops["bf16"] == 989.5
    assert machine.memory_bandwidth_gb_s == 4800
    assert machine.device_memory_gib == 100.0
    assert machine.devices_per_node == 8
    assert machine.driver == "570.86.15"
    assert machine.host_memory_gib == composed("cpu").host_memory_gib


def test_an_unknown_card_is_named_after_its_product(here: Any) -> None:
    here(*gpus("NVIDIA L40S", 2, 44.4))
    machine = detected()
    assert (machine.name, machine.device, machine.devices_per_node) == ("nvidia_l40s", "NVIDIA L40S", 2)
    assert machine.peak_tflops == {}


def test_overrides_win_over_what_is_detected(here: Any) -> None:
    here(*gpus())
    assert composed("auto").devices_per_node == 8
    assert composed("auto", devices_per_node=1).devices_per_node == 1
    assert composed("auto", device_memory_gib=40).device_memory_gib == 40
    assert composed("auto", devices_per_node=0).devices_per_node == 0  # for settings.check to refuse


def test_different_cards_in_one_machine_are_refused(here: Any) -> None:
    here(*gpus(count=2), *gpus("NVIDIA L40S", 1))
    with pytest.raises(SettingsError, match="2 × NVIDIA H200, 1 × NVIDIA L40S") as error:
        detected()
    assert "CUDA_VISIBLE_DEVICES" in error.value.hint


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("", []),
        ("2,0", [2, 0]),
        ("1, 3", [1, 3]),
        ("-1", []),
        ("0,9,1", [0]),
        ("GPU-0003", [3]),
        ("GPU-0003-aaaa,GPU-0001-aaaa", [3, 1]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    here: Any, monkeypatch: pytest.MonkeyPatch, value: str, indices: list[int]
) -> None:
    devices = gpus(count=4)
    here(*devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == [devices[index] for index in indices]


def fake_nvml(**functions: Any) -> Any:
    kinds = {name: type(name, (Exception,), {}) for name in ("NVMLError",)}
    kinds |= {
        name: type(name, (kinds["NVMLError"],), {})
        for name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
    }
    memory = SimpleNamespace(total=81559 * 2**20, reserved=551 * 2**20)
    defaults = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlMemory_v2": 2,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
        "nvmlDeviceGetMemoryInfo": lambda handle, version: memory,
        "nvmlSystemGetDriverVersion": lambda: "570.86.15",
    }
    return SimpleNamespace(**(kinds | defaults | functions))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def place(module: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        detect.nvml_gpus.cache_clear()

    yield place
    detect.nvml_gpus.cache_clear()


def test_memory_is_what_a_process_can_use(nvml: Any) -> None:
    nvml(fake_nvml())
    (gpu,) = detect.nvml_gpus()
    assert gpu.product == "NVIDIA H100 80GB HBM3"
    assert gpu.memory_bytes / GIB == pytest.approx(79.11, abs=0.01)


def test_no_driver_means_no_devices(nvml: Any) -> None:
    module = fake_nvml()

    def init() -> None:
        raise module.NVMLError_LibraryNotFound

    module.nvmlInit = init
    nvml(module)
    assert detect.nvml_gpus() == ()


def test_a_failing_driver_is_told_and_not_taken_for_none(nvml: Any) -> None:
    module = fake_nvml()

    def name(handle: int) -> str:
        raise module.NVMLError("GPU is lost")

    module.nvmlDeviceGetName = name
    nvml(module)
    with pytest.raises(SettingsError, match="GPU is lost"):
        detect.nvml_gpus()


def test_a_catalogue_machine_is_here_where_its_cards_are(here: Any) -> None:
    here(*gpus())
    assert is_here(composed("h200_141g"))
    assert is_here(composed("h200_141g", devices_per_node=2))
    assert not is_here(composed("cpu", device="another processor"))
    assert is_here(composed("cpu"))


@pytest.mark.parametrize(
    ("devices", "overrides", "reason"),
    [
        (gpus(), {"nodes": 2}, "2 nodes"),
        ((), {}, "no GPU is visible"),
        ((), {"nodes": 2}, "no GPU is visible"),
        (gpus("NVIDIA L40S"), {}, "here is NVIDIA L40S"),
        (gpus(count=4), {}, "here are 4"),
        (gpus(gib=70.0), {}, "here are 70.00 GiB"),
    ],
)
def test_the_reason_says_what_is_missing_here(
    here: Any, devices: tuple[Gpu, ...], overrides: dict[str, Any], reason: str
) -> None:
    here(*devices)
    assert reason in not_here_reason(composed("h200_141g", **overrides))


def test_detection_never_imports_torch() -> None:
    import subprocess

    script = "import sys, autotune.machine.detect as d; d.visible_gpus(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(detect.__file__).parents[2])
