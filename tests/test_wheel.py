"""The wheel carries conf/ and works where there is no checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autotune.settings import config_dir
from tests.commands import python, start

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the backend that pyproject.toml names, without fetching anything."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(CHECKOUT)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it, and none of its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=60)
    return folder


def test_the_wheel_holds_the_package_and_every_setting_and_no_test(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    conf = {f"autotune/conf/{path.relative_to(config_dir())}" for path in config_dir().rglob("*.yaml")}
    assert "autotune/conf/config.yaml" in conf
    assert {name for name in names if name.endswith(".yaml")} == conf
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "autotune").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0].split("-")[0] for name in names} == {"autotune"}


def test_the_wheel_works_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = python(tmp_path, "import autotune; print(autotune.__file__)", PYTHONPATH=str(installed)).finish()
    assert where.out.strip() == str(installed / "autotune" / "__init__.py")
    module = [sys.executable, "-m", "autotune"]
    composed = start([*module, "--cfg", "job", "model=gpt20b"], tmp_path, PYTHONPATH=str(installed)).finish()
    assert (composed.code, composed.err) == (0, "")
    assert "hidden_size: 6144" in composed.out
    helped = start([*module, "--help"], tmp_path, PYTHONPATH=str(installed)).finish()
    assert "gpt20b" in helped.out
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_brings_the_console_script(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "autotune"
    helped = start([str(script), "--help"], tmp_path, PYTHONPATH=str(installed)).finish()
    assert helped.code == 0
    assert helped.out.startswith("Find the DeepSpeed configuration")
