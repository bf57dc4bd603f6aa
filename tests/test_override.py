"""An override means what it says, or is refused with what was probably meant."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_origin, get_type_hints

import pytest

from autotune.errors import SettingsError
from autotune.override import OPEN, names
from autotune.settings import Settings, compose_settings
from autotune.workload.workload import Scheduler


def composed(*overrides: str) -> Settings:
    return compose_settings(["machine=cpu", *overrides])


@pytest.mark.parametrize("knob", ["micro_batch", "zero_stage", "accumulation"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("[1,2,3]", [1, 2, 3]),
        ("{low:1,high:8,log:true}", {"low": 1, "high": 8, "log": True}),
        ("{low:1,high:3,step:1}", {"low": 1, "high": 3, "step": 1}),
        ("null", None),
    ],
)
def test_a_knob_takes_a_scalar_a_list_or_a_range_whatever_conf_has(knob: str, text: str, value: Any) -> None:
    assert getattr(composed(f"space.{knob}={text}").space, knob) == value


def test_one_end_of_a_range_may_be_changed() -> None:
    assert composed("space.micro_batch.high=8").space.micro_batch == {"low": 1, "high": 8, "log": True}


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload.scheduler={type:WarmupLR,params:{warmup_num_steps:10}}"],
        ["workload.scheduler.type=WarmupLR", "workload.scheduler.params={warmup_num_steps:10}"],
        ["workload.scheduler.type=WarmupLR", "workload.scheduler.params.warmup_num_steps=10"],
    ],
    ids=["whole", "in parts", "in small parts"],
)
def test_a_scheduler_can_be_given_where_there_is_none(overrides: list[str]) -> None:
    assert composed(*overrides).workload.scheduler == Scheduler("WarmupLR", {"warmup_num_steps": 10})
    assert composed(*overrides, "workload.scheduler=null").workload.scheduler is None


def test_open_mappings_take_names_that_conf_does_not_have() -> None:
    settings = composed(
        "model.config.rotary_pct=0.5", "workload.optimizer.params={amsgrad:true}", "machine.peak_tflops.bf16=1.5"
    )
    assert settings.model.config["rotary_pct"] == 0.5
    assert settings.model.config["hidden_size"] == 128
    assert settings.workload.model == settings.model
    assert settings.workload.optimizer.params == {
        **composed().workload.optimizer.params,
        "amsgrad": True,
    }
    assert settings.machine.peak_tflops["bf16"] == 1.5


def test_the_open_mappings_are_those_of_the_schema() -> None:
    def mappings(kind: type[Any], prefix: str = "") -> list[str]:
        found = []
        types = get_type_hints(kind)
        for field in fields(kind):
            if get_origin(types[field.name]) is dict:
                found.append(prefix + field.name)
            elif is_dataclass(types[field.name]) and prefix != "workload." + field.name:
                found += mappings(types[field.name], f"{prefix}{field.name}.")
        return found

    assert {name for name in mappings(Settings) if not name.startswith("workload.model.")} == set(OPEN)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("space.micro_bach=4", "space.micro_batch"),
        ("space.micro_bach=[4]", "space.micro_batch"),
        ("+space.micro_bach=4", "space.micro_batch"),
        ("workload.seqlen=4", "workload.seq_len"),
        ("workload.optimizer.parms={lr:1}", "workload.optimizer.params"),
        ("probes=4", "budget.probes"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_is_like_it(override: str, meant: str) -> None:
    assert meant in names(Settings)
    with pytest.raises(SettingsError, match="there is no setting") as caught:
        composed(override)
    assert f"did you mean {meant}" in caught.value.hint


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("budget.probes=many", r"budget\.probes=many cannot be: value 'many' .* Integer"),
        ("workload.seq_len=null", r"workload\.seq_len=null cannot be: .* not Optional"),
        ("workload.scheduler={type:WarmupLR,parms:1}", "'parms'"),
        ("study.name=a=b", r"the override study\.name=a=b cannot be read"),
        ("space.micro_batch=[1,2", r"the override space\.micro_batch=\[1,2 cannot be read"),
        ("space=everything", "there is no space=everything"),
        ("probe.confirm_steps=0", "above 0"),
        ("probe.threads=0", "above 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_reason(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        composed(override)
    assert "\n" not in caught.value.message
    assert caught.value.hint
