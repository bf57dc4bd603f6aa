"""Every model and every machine composes with the rest of the settings."""

from __future__ import annotations

import pytest

from autotune.errors import SettingsError
from autotune.machine import detect
from autotune.settings import compose_settings, config_dir


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("name", [name for name in names("model") if name != "custom"])
def test_a_model_brings_its_own_sequence_length_and_batch(name: str) -> None:
    settings = compose_settings([f"model={name}", "machine=cpu"])
    assert settings.workload.model == settings.model
    assert settings.model.name == name
    assert settings.workload.global_batch
    assert compose_settings([f"model={name}", "machine=cpu", "workload.seq_len=64"]).workload.seq_len == 64


@pytest.mark.parametrize("name", [name for name in names("machine") if name not in ("auto", "cpu")])
def test_a_machine_of_the_catalogue_takes_overrides(name: str) -> None:
    settings = compose_settings([f"machine={name}", "machine.nodes=2", "machine.devices_per_node=4"])
    assert settings.machine.world_size == 8
    assert settings.study_name == f"gpt_tiny-{name}-2x4"


def test_without_a_gpu_the_machine_is_the_one_that_the_model_was_published_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "nvml_gpus", lambda: ())
    machine = compose_settings(["model=gpt20b"]).machine
    assert (machine.name, machine.nodes, machine.devices_per_node) == ("a100_40g", 12, 8)
    assert compose_settings(["model=gpt20b", "machine.nodes=4"]).machine.world_size == 32
    assert compose_settings(["model=gpt20b", "machine=cpu"]).machine.name == "cpu"
    assert compose_settings(["model=gpt_tiny"]).machine.name == "cpu"


def test_with_a_gpu_the_machine_is_the_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = detect.Gpu("NVIDIA H200", "GPU-0", int(139.8 * 2**30), "570")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(detect, "nvml_gpus", lambda: (h200, h200))
    machine = compose_settings(["model=gpt20b"]).machine
    assert (machine.name, machine.nodes, machine.devices_per_node) == ("h200_141g", 1, 2)


def test_zero_devices_are_refused_also_where_they_would_be_detected() -> None:
    with pytest.raises(SettingsError, match="no devices"):
        compose_settings(["machine=auto", "machine.devices_per_node=0"])


def test_trouble_in_detection_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> tuple[detect.Gpu, ...]:
        raise SettingsError("the NVIDIA devices here cannot be read: GPU is lost", "see nvidia-smi")

    monkeypatch.setattr(detect, "nvml_gpus", lost)
    with pytest.raises(SettingsError, match="GPU is lost") as error:
        compose_settings(["machine=auto"])
    assert error.value.hint == "see nvidia-smi"
    assert compose_settings(["machine=cpu"]).machine.name == "cpu"


def test_a_custom_model_needs_a_factory() -> None:
    with pytest.raises(SettingsError) as error:
        compose_settings(["model=custom", "machine=cpu"])
    assert "model.factory=" in error.value.hint
    settings = compose_settings(
        ["model=custom", "machine=cpu", "model.factory=mine.models:build", "+model.args.width=8"]
    )
    assert settings.workload.model.args == {"width": 8}


def test_an_unknown_model_is_told_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError) as error:
        compose_settings(["model=nonesuch"])
    assert "llama3_8b" in error.value.hint
