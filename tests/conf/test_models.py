"""Every model config names the class that people train, with the published shape."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from autotune.settings import config_dir

FOLDER = config_dir() / "model"
PUBLISHED = {
    "gpt2_xl": 1_557_611_200,
    "gpt20b": 20_554_567_680,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_7b": 7_615_616_512,
    "mixtral_8x7b": 46_702_792_704,
}

COUNT = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
found = {}
for name, (kind, fields) in json.load(sys.stdin).items():
    known = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found[name] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "unknown": sorted(field for field in fields if not hasattr(known, field)),
        "lost": sorted(field for field, value in fields.items() if getattr(config, field) != value),
        "dropouts": {
            field: value
            for field, value in config.to_dict().items()
            if ("dropout" in field or "pdrop" in field) and value and not field.startswith(("classifier", "summary"))
        },
    }
json.dump(found, sys.stdout)
"""


def loaded(name: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """Each model on the meta device, in one process of its own that alone imports torch."""
    models = {
        name: (loaded(name)["model"]["type"], loaded(name)["model"]["config"]) for name in [*PUBLISHED, "gpt_tiny"]
    }
    done = subprocess.run(
        [sys.executable, "-c", COUNT], input=json.dumps(models), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_models_are_those_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} >= {*PUBLISHED, "gpt_tiny", "custom"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_the_published_ones(name: str, built: dict[str, Any]) -> None:
    assert built[name]["parameters"] == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", [*PUBLISHED, "gpt_tiny"])
def test_no_field_is_ignored_and_nothing_drops_out(name: str, built: dict[str, Any]) -> None:
    assert built[name]["unknown"] == []
    assert built[name]["lost"] == []
    assert built[name]["dropouts"] == {}


@pytest.mark.parametrize("name", [*PUBLISHED, "gpt_tiny"])
def test_sequences_fit_the_model_and_batches_divide_over_eight_devices(name: str) -> None:
    values = loaded(name)
    config = values["model"]["config"]
    longest = config.get("max_position_embeddings") or config["n_positions"]
    assert values["workload"]["seq_len"] <= longest
    assert values["workload"]["global_batch"] % 8 == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_machine_it_was_published_on_is_in_the_catalogue(name: str) -> None:
    machine = loaded(name)["model"].get("published_on")
    assert machine is None or (config_dir() / "machine" / f"{machine}.yaml").exists()
