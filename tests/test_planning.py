"""A sweep for a machine that is not here, from the command line to the files: planned, and marked as such."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cli import main
from autotune.errors import SettingsError
from autotune.machine import detect
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.table import TableProber
from autotune.probe.virtual.prediction import Prediction
from autotune.settings import Settings, compose_settings
from autotune.store.records import winner_of
from autotune.store.store import Store
from autotune.tune import chosen, tune
from tests.oracle import Oracle

SMALL = ("space.offload_optimizer=none", "space.offload_param=none", "space.checkpoint_blocks=[none,all]")
SENTENCE = (
    "planning for a100_40g (12 × 8 devices, on which gpt20b was published) because machine=a100_40g has "
    "NVIDIA A100-SXM4-40GB devices, and no GPU is visible here; nothing is measured"
)
STUDY = "gpt20b-a100_40g-12x8"


@pytest.fixture(autouse=True)
def oracle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No GPU is here, a stand-in predicts, and studies lie in a folder of the test's own."""
    monkeypatch.setattr(detect, "nvml_gpus", lambda: ())
    monkeypatch.setitem(sys.modules, "autotune.probe.virtual.prober", SimpleNamespace(VirtualProber=Oracle))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORE", raising=False)
    Oracle.made = []
    yield
    assert all(made.closed for made in Oracle.made)


def settings(*overrides: str) -> Settings:
    return compose_settings(["model=gpt20b", *SMALL, *overrides])


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config, recipe = (json.loads((folder / name).read_text()) for name in ("deepspeed_config.json", "recipe.json"))
    return config, recipe


def test_without_a_gpu_the_command_plans_for_the_published_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=gpt20b", *SMALL]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == SENTENCE
    first, study, ended, *_ = told.out.splitlines()
    assert first == "PLANNED, NOT MEASURED: every figure here is predicted for a100_40g"
    assert study.startswith(f"study      {STUDY}: ")
    assert ended.endswith("ended: every candidate is tried")
    assert told.out.splitlines()[-2:] == [
        f"studies/{STUDY}/{name}" for name in ("deepspeed_config.json", "recipe.json")
    ]


def test_everything_is_looked_at_and_counted_by_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = tune(settings("machine.device_memory_gib=26.5"))
    [made] = Oracle.made
    assert made.prepared == made.probed
    assert len(made.probed) == result.counts.outcomes.total() > 10
    verdicts = Counter(made.predict(candidate).verdict.value for candidate in made.probed)
    total, fit, risk, out = verdicts.total(), verdicts["fits"], verdicts["at risk"], verdicts["does not fit"]
    counted = f"{total} candidates looked at: {fit} fit, {risk} are at risk, {out} do not fit"
    assert counted in capsys.readouterr().out
    assert min(fit, risk, out) > 0


def test_the_summary_calls_the_time_an_estimate_and_has_the_memory_of_every_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tune(settings())
    out = capsys.readouterr().out
    estimates = [line for line in out.splitlines() if "roofline estimate" in line]
    assert "tokens/s" in estimates[0]
    assert estimates[-1].startswith("gain")
    assert estimates[-1].endswith("it ranks candidates, and promises nothing")
    for phase in ("load", "init", "first step", "forward", "backward", "step"):
        assert any(line.split("  ")[0].strip() == phase for line in out.splitlines()), phase
    assert "predicted memory of rank 5" in out


def test_both_files_are_usable_and_the_recipe_is_marked() -> None:
    result, files = tune(settings())
    config, recipe = written(files[0].parent)
    assert recipe["status"] == "planned, not measured"
    assert any("predicted, not measured" in warning for warning in recipe["warnings"])
    assert recipe["measurement"]["probe_kind"] == "virtual"
    assert recipe["measurement"]["prediction"]["verdict"] == "fits"
    assert recipe["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert config["train_micro_batch_size_per_gpu"] == result.winner.candidate.micro_batch
    assert "status" not in config


def test_the_same_plan_again_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tune(settings())
    first = capsys.readouterr().out
    tune(settings())
    assert Oracle.made[-1].probed == []
    assert capsys.readouterr().out == first


def test_a_plan_leaves_the_files_and_the_winner_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(candidate: Any) -> Measurement:
        return Measurement(Outcome.OK, "torchrun", tokens_per_s=100.0 + candidate.micro_batch, step_s=1.0)

    class Here(Oracle):
        kind = "torchrun"

        def probe(self, request: Any) -> Measurement:
            return TableProber(measured).probe(replace(request, stop_below_tokens_per_s=None))

    tune(settings())
    with monkeypatch.context() as patched:
        patched.setattr("autotune.tune.not_here_reason", lambda machine: "")
        patched.setattr("autotune.tune.look", lambda machine: ["device 3 is busy"])
        given: list[Any] = []
        patched.setattr(
            "autotune.tune.make_prober",
            lambda kind, settings, tell, devices: given.append(devices) or Here(settings, tell),
        )
        real, files = tune(settings("budget.probes=5"))
    # what was found of the devices is said, and handed on to be kept
    assert given == [["device 3 is busy"]]
    assert " device 3 is busy\n" in capsys.readouterr().err
    folder = Path("studies") / STUDY
    assert files[0].parent == folder
    assert written(folder)[1]["status"] == "measured"
    _, files = tune(settings())
    assert files[0].parent == folder / "planned"
    assert written(folder)[1]["status"] == "measured"
    assert written(folder / "planned")[1]["status"] == "planned, not measured"
    store = Store.open("sqlite:///studies/autotune.db")
    winner = winner_of(store.study(STUDY), store.probes(STUDY))
    store.close()
    assert winner == real.winner


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (("machine=cpu",), "torchrun"),
        (("machine=cpu", "probe=torchrun"), "torchrun"),
        (("machine=cpu", "probe=virtual"), "virtual"),
        (("machine=b200",), "virtual"),
        ((), "torchrun"),
        (("model=gpt20b",), "virtual"),
        (("model=gpt20b", "machine=cpu"), "torchrun"),
    ],
    ids=str,
)
def test_the_machine_here_is_measured_and_any_other_is_planned_for(overrides: tuple[str, ...], kind: str) -> None:
    chose, reason = chosen(compose_settings(list(overrides)))
    assert chose == kind
    assert bool(reason) == (kind == "virtual")


def test_what_is_not_here_is_not_measured() -> None:
    with pytest.raises(SettingsError, match="no GPU is visible") as error:
        chosen(compose_settings(["machine=b200", "probe=torchrun"]))
    assert "probe=virtual" in error.value.hint


# -- check --------------------------------------------------------------------------------------------------------

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"}},
}


def check(capsys: pytest.CaptureFixture[str], *overrides: str, **changes: Any) -> tuple[int, str]:
    Path("config.json").write_text(json.dumps(CONFIG | changes))
    code = main(["check", "config.json", *overrides])
    return code, capsys.readouterr().out


def test_check_adds_what_a_config_takes_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, "model=gpt20b", "machine=a100_80g")
    assert code == 0
    assert out.startswith("config.json on a100_80g, 1 × 8 devices: nothing to object to\n")
    assert "fits: 26.00 GiB of 79.10 GiB per device (32.9 %" in out
    assert "host 96.00 GiB of 2,048.00 GiB per node" in out
    assert "what holds it at the peak" in out
    assert "gpt_neox.layers.*.mlp" in out
    [(candidate, config)] = Oracle.made[0].asked
    assert (candidate.micro_batch, candidate.accumulation, candidate.offload_optimizer) == (4, 4, "cpu")
    assert config is not None
    assert config["optimizer"]["type"] == "AdamW"
    assert config["zero_optimization"] == CONFIG["zero_optimization"]


def test_check_takes_what_no_config_says_from_fixed_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    check(capsys, "model=gpt20b", "space.checkpoint_blocks=all", "space.expandable_segments=true")
    candidate, _ = Oracle.made[0].asked[0]
    assert (candidate.checkpoint_blocks, candidate.checkpoint_part, candidate.checkpoint_input) == (
        "all",
        "whole",
        "device",
    )
    assert candidate.expandable_segments is True


def test_check_says_what_is_at_risk_and_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, "model=gpt20b", "machine=a100_40g", train_micro_batch_size_per_gpu=8)
    assert (code, "does not fit: 42.00 GiB of 39.40 GiB" in out) == (3, True)
    assert "out of memory in backward, layers.7.mlp: 2.00 GiB asked for" in out
    code, out = check(capsys, "model=gpt20b", "machine=a100_40g", "machine.device_memory_gib=26.5")
    assert (code, "at risk: 26.00 GiB of 26.50 GiB" in out) == (0, True)
    code, out = check(capsys, "model=gpt20b", "machine=a100_40g", "machine.host_memory_gib=64")
    assert (code, "does not fit: 26.00 GiB of 39.40 GiB" in out) == (3, True)
    assert "host 96.00 GiB of 64.00 GiB per node: too much" in out


def test_check_as_json_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = check(capsys, "model=gpt20b", "--format", "json")
    document = json.loads(out)
    assert document["findings"] == []
    assert document["prediction"]["verdict"] == "fits"
    assert document["prediction"].keys() == set(Prediction.__dataclass_fields__)


def test_check_predicts_nothing_that_deepspeed_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, "model=gpt20b", train_batch_size=17)
    assert code == 2
    assert out.endswith("\nnot predicted: DeepSpeed refuses this config\n")
    assert Oracle.made == []


def test_check_without_a_model_predicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "machine=a100_80g") == (0, "config.json on a100_80g, 1 × 8 devices: nothing to object to\n")
    assert Oracle.made == []


def test_what_cannot_be_traced_is_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": 7}))
    assert main(["check", "config.json", "model=gpt20b"]) == 2
    assert "error: aten::nonzero in layers.3 cannot be traced" in capsys.readouterr().err
