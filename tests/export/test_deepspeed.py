"""The two files of a winner say all that a training needs, and are whole or absent."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.export.deepspeed import PREDICTED, UNIVERSAL_CHECKPOINT, write_winner
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.space.config import deepspeed_config
from autotune.store.records import ProbeRecord
from autotune.workload.workload import Model, Workload

MACHINE = Machine(name="a100_80g", device="NVIDIA A100-SXM4-80GB", devices_per_node=8, device_memory_gib=80.0)
WORKLOAD = Workload(model=Model(name="llama3_8b", type="llama"), seq_len=4096, global_batch=512)
CANDIDATE = Candidate(micro_batch=4, accumulation=16, zero_stage=2, precision="bf16")


def record(candidate: Candidate = CANDIDATE, kind: str = "torchrun") -> ProbeRecord:
    measurement = Measurement(
        outcome=Outcome.OK,
        probe_kind=kind,
        tokens_per_s=80_000.0,
        tokens_per_s_low=79_000.0,
        tokens_per_s_high=81_000.0,
        step_s=26.2,
        step_times_s=[26.2] * 15,
        peak_allocated_bytes=50 * 2**30,
        peak_reserved_bytes=60 * 2**30,
        environment={"threads": 8, "processors": [0, 1], "PYTORCH_ALLOC_CONF": "", "torch": "2.13.0", "driver": "570"},
    )
    return ProbeRecord(
        study="llama3_8b-a100_80g-1x8",
        trial=41,
        key=candidate.key,
        candidate=candidate,
        measurement=measurement,
        inferred=False,
        reused=False,
        confirmation=True,
        optuna_study=None,
        optuna_number=None,
        created="2026-01-01T00:00:00.000+00:00",
    )


def written(directory: Path, *arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    config, recipe = write_winner(*(arguments or (record(), WORKLOAD, MACHINE)), directory)  # type: ignore[misc]
    assert (config.name, recipe.name) == ("deepspeed_config.json", "recipe.json")
    return json.loads(config.read_text()), json.loads(recipe.read_text())


def test_the_config_is_the_one_that_was_probed(tmp_path: Path) -> None:
    config, _ = written(tmp_path / "new" / "folder")
    assert config == deepspeed_config(CANDIDATE, WORKLOAD, MACHINE)
    assert "auto" not in json.dumps(config)
    assert "train_batch_size" not in config


def test_the_recipe_says_where_the_numbers_come_from(tmp_path: Path) -> None:
    _, recipe = written(tmp_path)
    assert (recipe["study"], recipe["trial"], recipe["key"]) == ("llama3_8b-a100_80g-1x8", 41, CANDIDATE.key)
    assert Candidate.from_dict(recipe["candidate"]) == CANDIDATE
    assert recipe["global_batch"] == 512
    assert recipe["measurement"]["tokens_per_s_per_device"] == 10_000
    assert recipe["measurement"]["tokens_per_s_low"] == 79_000
    assert recipe["measurement"]["device_memory_share"] == 0.75
    assert recipe["versions"] == {"torch": "2.13.0", "driver": "570"}
    assert Workload.from_dict(recipe["workload"]) == WORKLOAD
    assert recipe["machine"].pop("fingerprint") == MACHINE.fingerprint
    assert Machine.from_dict(recipe["machine"]) == MACHINE


def test_the_recipe_has_the_environment_to_set(tmp_path: Path) -> None:
    _, plain = written(tmp_path)
    assert plain["environment"] == {"OMP_NUM_THREADS": "8"}
    _, recipe = written(tmp_path, record(CANDIDATE.replace(expandable_segments=True)), WORKLOAD, MACHINE)
    assert "expandable_segments:True" in recipe["environment"].values()


def test_the_recipe_says_how_to_checkpoint(tmp_path: Path) -> None:
    _, plain = written(tmp_path)
    assert plain["checkpointing"] is None
    assert "checkpointing" not in plain["use"]
    checkpointed = CANDIDATE.replace(checkpoint_blocks="half", checkpoint_part="mlp", checkpoint_input="cpu")
    config, recipe = written(tmp_path, record(checkpointed), WORKLOAD, MACHINE)
    assert recipe["checkpointing"] == {"blocks": "half", "part": "mlp", "input": "cpu"}
    assert 'apply_checkpointing(model, "half", "mlp", "cpu")' in recipe["use"]["checkpointing"]
    assert "activation_checkpointing" not in config


def test_the_recipe_warns_of_changes_in_mid_training(tmp_path: Path) -> None:
    _, recipe = written(tmp_path)
    assert UNIVERSAL_CHECKPOINT in recipe["warnings"]
    assert PREDICTED not in recipe["warnings"]
    assert recipe["status"] == "measured"
    _, predicted = written(tmp_path, record(kind="virtual"), WORKLOAD, MACHINE)
    assert PREDICTED in predicted["warnings"]
    assert predicted["status"] == "planned, not measured"


def test_a_candidate_on_nvme_needs_the_path(tmp_path: Path) -> None:
    candidate = CANDIDATE.replace(zero_stage=3, offload_optimizer="nvme")
    with pytest.raises(SettingsError, match="nvme_path"):
        write_winner(record(candidate), WORKLOAD, MACHINE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    config, _ = write_winner(record(candidate), WORKLOAD, MACHINE, tmp_path, "/local_nvme")
    assert json.loads(config.read_text())["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/local_nvme"


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = write_winner(record(), WORKLOAD, MACHINE, tmp_path)
    before = old.read_text()

    def full(self: Path, *arguments: Any, **options: Any) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SettingsError, match="No space left on device"):
        write_winner(record(CANDIDATE.replace(micro_batch=8)), WORKLOAD, MACHINE, tmp_path)
    assert old.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepspeed_config.json", "recipe.json"]


def test_risks_and_what_was_compared_are_in_the_recipe(tmp_path: Path) -> None:
    won = record()
    found = {"agrees": True, "reason": None, "reference_trial": 40, "loss": 3e-5}
    measurement = dataclasses.replace(won.measurement, at_risk="it leaks", detail={"parity": found})
    _, recipe = written(tmp_path, dataclasses.replace(won, measurement=measurement), WORKLOAD, MACHINE)
    assert recipe["parity"] == found
    assert "At risk: it leaks." in recipe["warnings"]
