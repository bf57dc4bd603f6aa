"""What is known of a model before anything of it is probed."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.probe.torchrun.describe import describe
from autotune.settings import compose_settings
from autotune.workload.workload import Workload

pytestmark = pytest.mark.probes

BLOCKS = """
from torch import nn


class Block(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(8, 8))

def build(blocks=2, names=()):
    model = nn.Module()
    model.layers = nn.ModuleList(Block(names) for _ in range(blocks))
    return model, lambda sequences, seq_len, device: {}

def broken():
    raise RuntimeError("it needs its data")
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"blocks_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(BLOCKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def workload(*overrides: str) -> Workload:
    return compose_settings(["machine=cpu", *overrides]).workload


def test_every_part_of_a_transformers_model_can_be_checkpointed() -> None:
    described = describe(workload())
    assert described.parameters == 2_238_464
    assert max(described.parameter_sizes) == 4096 * 128
    assert described.not_checkpointed == {}
    assert described.error is None


def test_a_custom_model_is_known_by_its_source_and_by_the_parts_that_its_blocks_have(custom: str) -> None:
    factory = f"model.factory={custom}:build"
    described = describe(workload("model=custom", factory, "model.args={names:[attn,other]}"))
    assert described.parameters == 2 * 2 * 72
    assert described.source
    assert described.not_checkpointed.keys() == {"quarter/mlp", "half/mlp", "all/mlp"}
    assert "no part named like its mlp (its parts: attn, other)" in described.not_checkpointed["half/mlp"]


def test_a_model_without_repeated_blocks_cannot_be_checkpointed_at_all(custom: str) -> None:
    factory = f"model.factory={custom}:build"
    described = describe(workload("model=custom", factory, "model.args={blocks:1,names:[attn,mlp]}"))
    assert len(described.not_checkpointed) == 9
    assert "no list of repeated blocks" in described.not_checkpointed["all/whole"]


def test_what_cannot_be_trained_is_told_and_what_cannot_be_built_without_data_is_left_to_a_probe(custom: str) -> None:
    missing = describe(workload("model=custom", "model.factory=nonesuch:build"))
    assert missing.error is not None
    assert "nonesuch:build cannot be imported" in missing.error
    unbuilt = describe(workload("model=custom", f"model.factory={custom}:broken"))
    assert (unbuilt.error, unbuilt.parameters, unbuilt.not_checkpointed) == (None, None, {})
