"""The manifest is a TrainJob as Kubeflow's own models know it, and its workers' command is one that works."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob
from pydantic import ValidationError

from autotune.settings import compose_settings, environment_store

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "trainjob.yaml"


@pytest.fixture
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return loaded


def checked(manifest: dict[str, Any]) -> None:
    """Refuse what the schema does not know, which its models would drop, and what it asks for and does not get."""
    job = TrainJob.from_dict(manifest)
    assert job is not None
    assert job.to_dict() == manifest


def test_it_is_a_train_job_with_known_fields_alone(manifest: dict[str, Any]) -> None:
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    checked(manifest)


def test_the_check_sees_a_misspelt_field_and_a_missing_one(manifest: dict[str, Any]) -> None:
    manifest["spec"]["trainer"]["numNode"] = manifest["spec"]["trainer"].pop("numNodes")
    with pytest.raises(AssertionError):
        checked(manifest)
    del manifest["spec"]["runtimeRef"]["name"]
    with pytest.raises(ValidationError):
        checked(manifest)


def test_its_workers_run_a_command_that_is_understood_on_gpus_with_the_store_from_a_secret(
    manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = manifest["spec"]["trainer"]
    assert shlex.join(trainer["command"]) == "python -m autotune"
    compose_settings(["machine=h100_80g", *trainer["args"]])
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    (variable,) = trainer["env"]
    assert set(variable["valueFrom"]) == {"secretKeyRef"}
    monkeypatch.setenv(variable["name"], "postgresql://db/studies")
    assert environment_store() == "postgresql://db/studies"
