"""What `check` says about a DeepSpeed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.space.check import findings, read_config
from autotune.space.rule import Kind
from autotune.workload.workload import Model, Workload

# As people have it from a tutorial.
TUTORIAL: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "allgather_partitions": True,
    },
}


def found(config: dict[str, Any], devices: int = 1, factory: str = "") -> list[tuple[str, str]]:
    workload = Workload(model=Model(name="m", factory=factory))
    return [
        (finding.rule.id, finding.where)
        for finding in findings(config, workload, Machine(name="gpus", devices_per_node=devices))
    ]


def test_a_tutorials_config_is_told_all_it_gets_wrong_the_silent_things_first() -> None:
    assert found(TUTORIAL, devices=2) == [
        ("auto_dropped", "fp16.enabled"),
        ("offload_param_below_stage3", "zero_optimization.offload_param.device"),
        ("allgather_partitions", "zero_optimization.allgather_partitions"),
        ("checkpointing_section", "activation_checkpointing"),
        ("batch_identity", "train_batch_size"),
        ("contiguous_number", "activation_checkpointing.contiguous_memory_optimization"),
    ]


def test_the_batch_is_right_on_one_device() -> None:
    assert "batch_identity" not in dict(found(TUTORIAL, devices=1))


def test_findings_say_what_happens_with_numbers_and_what_to_do() -> None:
    told = {finding.rule.id: finding for finding in findings(TUTORIAL, Workload(), Machine(name="gpus"))}
    assert "the run is fp32" in told["auto_dropped"].sentence
    assert "16 ≠ 4 × 4 × 8" in told["batch_identity"].sentence
    assert all(finding.remedy for finding in told.values())


def test_a_model_of_ones_own_may_read_the_checkpointing_section() -> None:
    assert "checkpointing_section" not in dict(found(TUTORIAL, factory="mine:model"))


@pytest.mark.parametrize(
    ("config", "rule", "where", "note"),
    [
        ({"zero_optimisation": {"stage": 2}}, "unknown_key", "zero_optimisation", "did you mean zero_optimization?"),
        (
            {"zero_optimization": {"stge": 2}},
            "unknown_section_key",
            "zero_optimization.stge",
            "zero_optimization.stage?",
        ),
        ({"data_types": {"grad_dtype": "fp32"}}, "unknown_key", "data_types.grad_dtype", "grad_accum_dtype?"),
        ({"xyzzy": 1}, "unknown_key", "xyzzy", "no key looks like it"),
        ({"gradient_accumulation_steps": [1, 2]}, "batch_number", "gradient_accumulation_steps", "it is [1, 2]"),
        ({"gradient_clipping": "auto"}, "auto_refused", "gradient_clipping", ""),
        ({"zero_optimization": {"stage": "auto"}}, "auto_dropped", "zero_optimization.stage", "the stage is 0"),
        ({"zero_optimization": {"stage": 4}}, "stage_number", "zero_optimization.stage", ""),
        ({"elasticity": {"enabled": False}}, "removed_key", "elasticity", ""),
    ],
)
def test_spelling_mistakes_and_leftovers_are_named(config: dict[str, Any], rule: str, where: str, note: str) -> None:
    told = findings({"train_micro_batch_size_per_gpu": 1, **config}, Workload(), Machine(name="gpus"))
    assert [(finding.rule.id, finding.where) for finding in told] == [(rule, where)]
    assert note in told[0].sentence


def test_keys_that_start_with_an_underscore_are_comments() -> None:
    assert found({"train_micro_batch_size_per_gpu": 1, "_comment": "mine"}) == []


def test_zero_switched_on_the_old_way_is_stage_1() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": True}
    assert found({**config, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}) == []


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": None, "optimizer": [], "fp16": "yes", "bf16": {"enabled": None}, "scheduler": 3},
        {"zero_optimization": {"stage": {}, "offload_optimizer": "cpu", "zenflow": [], "reduce_bucket_size": "5e8"}},
        {"optimizer": {"type": 3, "params": "auto"}, "train_batch_size": {}, "activation_checkpointing": False},
    ],
)
def test_nonsense_is_judged_without_a_crash(config: dict[str, Any]) -> None:
    assert isinstance(found(config), list)


def test_silent_rules_come_before_those_that_deepspeed_tells_about() -> None:
    kinds = [finding.rule.kind for finding in findings(TUTORIAL, Workload(), Machine(name="gpus"))]
    assert kinds == sorted(kinds, key=[Kind.IGNORE, Kind.CHANGE, Kind.REFUSE].index)


def test_a_config_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1}')
    assert read_config(path) == {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "is not JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "has the key c twice"),
        (b"[1]", "does not hold a JSON object"),
        (b"\xff\xfe\x00", "is not a text file"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes | None, what: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=what) as error:
        read_config(path)
    assert error.value.hint
