"""What users' own models do on devices without data: a clear outcome, never a wrong number, never a hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.probe.measurement import Measurement, Outcome
from autotune.workload.phase import Phase
from tests.probe.torchrun.conftest import CHECKPOINTED, PLAIN, STAGES

from .conftest import MakeProber, probe

BASE = ("model=custom", "model.factory=models:build", "machine=a100_80g", "machine.devices_per_node=1")
WHERE = "blocks.1.deed"

Do = Callable[..., Measurement]


@pytest.fixture
def do(prober: MakeProber, monkeypatch: pytest.MonkeyPatch) -> Do:
    """Probe the model of models.py, which does what `deed` says in its second block."""
    monkeypatch.chdir(Path(__file__).parent)

    def run(deed: str, stage: int = 0, **knobs: str) -> Measurement:
        made = prober(f"+model.args={{deed:{deed}}}", "workload.seq_len=32", "workload.global_batch=null", base=BASE)
        return probe(made, PLAIN.replace(**STAGES[stage] | {"micro_batch": 1, "accumulation": 1} | knobs))

    return run


@pytest.mark.parametrize(
    ("deed", "operation"),
    [
        ("branch", "aten::_local_scalar_dense"),
        ("item", "aten::_local_scalar_dense"),
        ("list", "aten::_local_scalar_dense"),
        ("nonzero", "aten::nonzero"),
        ("select", "aten::index.Tensor"),
        ("equal", "aten::equal"),
        ("numpy", ".numpy()"),
        ("select_twice", "aten::nonzero"),
    ],
)
def test_what_depends_on_data_is_invalid_and_named(do: Do, deed: str, operation: str) -> None:
    found = do(deed)
    assert (found.outcome, found.phase) == (Outcome.INVALID, Phase.FORWARD)
    assert (found.message or "").startswith(f"cannot be traced: {operation} in {WHERE} (")


@pytest.mark.parametrize("knobs", [{}, CHECKPOINTED])
def test_so_is_what_depends_on_data_in_backward(do: Do, knobs: dict[str, str]) -> None:
    found = do("ask_backward", **knobs)
    assert (found.outcome, found.phase) == (Outcome.INVALID, Phase.BACKWARD)
    assert (found.message or "").startswith(f"cannot be traced: aten::_local_scalar_dense in {WHERE} (")


def test_what_depends_on_positions_is_traced(do: Do) -> None:
    found = do("positions")
    assert found.outcome is Outcome.OK, found.message


@pytest.mark.parametrize(
    ("deed", "phase", "message"),
    [
        ("fail", Phase.FORWARD, "ValueError: the model says no"),
        ("fail_backward", Phase.BACKWARD, "ValueError: the gradient says no"),
        ("exit", Phase.FORWARD, "SystemExit: the model leaves"),
        ("debug", Phase.FORWARD, "BdbQuit"),  # nobody is there to answer
        ("kill", Phase.FORWARD, "the process that traced it was killed by SIGKILL"),
        ("kill_load", Phase.LOAD, "the process that traced it was killed by SIGKILL"),
    ],
)
def test_what_fails_is_a_crash_that_says_why(do: Do, deed: str, phase: Phase, message: str) -> None:
    found = do(deed)
    assert (found.outcome, found.phase, found.message) == (Outcome.CRASHED, phase, message)
    assert do("none").outcome is Outcome.OK


@pytest.mark.parametrize("stage", [2, 3])
def test_an_error_in_backward_is_told_where_deepspeed_listens_to_it(do: Do, stage: int) -> None:
    found = do("fail_backward", stage, **CHECKPOINTED)
    assert (found.outcome, found.message) == (Outcome.CRASHED, "ValueError: the gradient says no")


def test_a_crash_is_not_kept_for_another_day(do: Do, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    do("fail")
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".npz", ".error")] == []
    do("item")
    assert len(list(tmp_path.rglob("*.error"))) == 1


def test_a_model_may_print(do: Do, capfd: pytest.CaptureFixture[str]) -> None:
    assert do("chat").outcome is Outcome.OK
    assert "talks" not in capfd.readouterr().out


def test_a_model_that_cannot_be_imported_is_invalid(prober: MakeProber) -> None:
    found = probe(prober("model.factory=no_such_module:build", base=(BASE[0], *BASE[2:])), PLAIN)
    assert (found.outcome, found.phase) == (Outcome.INVALID, Phase.LOAD)
    assert "no_such_module" in (found.message or "")
