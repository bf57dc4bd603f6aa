"""The catalogue of machines is complete, consistent and gives its sources."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from autotune.machine.machine import Machine
from autotune.settings import config_dir

FOLDER = config_dir() / "machine"
CATALOGUE = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in ("auto", "cpu"))


def machine(name: str) -> Machine:
    loaded = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(Machine), OmegaConf.load(FOLDER / f"{name}.yaml"))
    )
    assert isinstance(loaded, Machine)
    return loaded


def test_the_catalogue_has_the_machines_that_people_train_on() -> None:
    assert " ".join(CATALOGUE) == ("a100_40g a100_80g b200 gh200_96g h100_80g h200_141g mi300x rtx4090_24g v100_32g")


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_figure_is_given(name: str) -> None:
    entry = machine(name)
    assert entry.name == name
    assert entry.accelerator == "cuda"
    assert entry.device
    missing = [field for field, value in entry.to_dict().items() if not value and field != "driver"]
    assert missing == []
    assert {"fp32", "fp16"} <= set(entry.peak_tflops)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_figure_names_its_source(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    sources = set(re.findall(r"^# (\[\w+\]) \S.*", "\n".join(lines), re.MULTILINE))
    assert "[gpu]" in sources
    for line in lines:
        if re.match(r"\s*\w+: [\d.]+( |$)", line) and not line.startswith("nodes:"):
            used = set(re.findall(r"\[\w+\]", line))
            assert (used and used <= sources) or re.search("# (measured|assumed|estimate)", line), line


@pytest.mark.parametrize("name", CATALOGUE)
def test_torch_sees_a_little_less_than_the_nominal_memory(name: str) -> None:
    nominal = re.search(r"nominal (\d+)( GB)?$", (FOLDER / f"{name}.yaml").read_text(), re.MULTILINE)
    assert nominal
    assert 0.97 * int(nominal[1]) < machine(name).device_memory_gib < int(nominal[1])


def test_products_are_distinct() -> None:
    products = [machine(name).device for name in CATALOGUE]
    assert len(set(products)) == len(products)
