"""The store keeps what it is given, for every database."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.store.store import Store
from autotune.workload.phase import Phase
from autotune.workload.workload import Workload

Open = Callable[..., Store]
CANDIDATE = Candidate(micro_batch=1, accumulation=16, zero_stage=1, precision="bf16")
OK = Measurement(Outcome.OK, "table", phase=Phase.STEP, tokens_per_s=100.0, peak_reserved_bytes=5)

counts = st.none() | st.integers(0, 2**62)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
measurements = st.builds(
    Measurement,
    outcome=st.sampled_from(Outcome),
    probe_kind=st.sampled_from(["torchrun", "virtual", "table"]),
    phase=st.none() | st.sampled_from(Phase),
    message=st.none() | st.text(),
    tokens_per_s=numbers,
    step_s=numbers,
    step_times_s=st.lists(st.floats(allow_nan=False), max_size=3),
    peak_allocated_bytes=counts,
    peak_reserved_bytes=counts,
    device_total_bytes=counts,
    worst_rank=st.none() | st.integers(0, 4096),
    needed_bytes=counts,
    host_peak_bytes=counts,
    losses=st.lists(st.floats(allow_nan=False), max_size=3),
    memory=st.dictionaries(
        st.sampled_from([phase.value for phase in Phase]),
        st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=2), max_size=2),
        max_size=2,
    ),
    wall_s=st.floats(0, 1e6),
    overhead_s=numbers,
    environment=st.dictionaries(st.text(max_size=5), json_values, max_size=2),
    detail=st.dictionaries(st.text(max_size=5), json_values, max_size=2),
)


@hypothesis_settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    measurement=measurements, marks=st.fixed_dictionaries({"inferred": st.booleans(), "confirmation": st.booleans()})
)
def test_a_probe_comes_back_exactly_as_it_was_put_in(
    url: str, workload: Workload, machine: Machine, measurement: Measurement, marks: dict[str, Any]
) -> None:
    store = Store.open(url)
    store.open_study("s", workload, machine)
    put = store.add_probe("s", CANDIDATE, measurement, reuse_key="k", optuna_study="s/x", optuna_number=3, **marks)
    assert store.probes("s")[-1] == put
    assert put.measurement == measurement
    assert (put.candidate, put.key, put.optuna_study, put.optuna_number) == (CANDIDATE, CANDIDATE.key, "s/x", 3)
    store.close()


def test_the_loss_of_a_diverged_probe_stays_nan(url: str, opened: Open, workload: Workload, machine: Machine) -> None:
    store = opened(url)
    store.open_study("s", workload, machine)
    store.add_probe("s", CANDIDATE, Measurement(Outcome.DIVERGED, "table", losses=[1.0, math.nan, math.inf]))
    losses = store.probes("s")[0].measurement.losses
    assert losses[0] == 1.0
    assert math.isnan(losses[1])
    assert math.isinf(losses[2])


def test_probes_are_numbered_from_one_in_each_study(
    url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    store = opened(url)
    for name in ("a", "b"):
        store.open_study(name, workload, machine)
    assert [store.add_probe(name, CANDIDATE, OK).trial for name in ("a", "a", "b", "a")] == [1, 2, 1, 3]
    assert [record.trial for record in store.probes("a")] == [1, 2, 3]


def test_what_is_stored_is_there_for_the_next_to_open(
    url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    first = opened(url)
    made = first.open_study("s", workload, machine)
    first.set_baseline("s", CANDIDATE.key)
    probe = first.add_probe("s", CANDIDATE, OK)
    first.set_winner("s", probe.trial)
    second = opened(url, create=False)
    assert second.probes("s") == [probe]
    assert second.study("s") == dataclasses.replace(made, baseline_key=CANDIDATE.key, winner_trial=1)
    assert [study.name for study in second.studies()] == ["s"]
    assert (second.study("s").workload, second.study("s").machine) == (workload, machine)


def test_another_workload_is_refused_and_what_differs_is_named(
    url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    store = opened(url)
    store.open_study("s", workload, machine)
    store.add_probe("s", CANDIDATE, OK)
    longer = dataclasses.replace(
        workload, seq_len=256, model=dataclasses.replace(workload.model, config={"n_layer": 4})
    )
    with pytest.raises(SettingsError) as caught:
        store.open_study("s", longer, machine)
    assert "workload.seq_len 128 → 256" in caught.value.message
    assert "workload.model.config.n_layer 2 → 4" in caught.value.message
    assert "global_batch" not in caught.value.message
    assert "study.name=" in caught.value.hint


def test_another_machine_is_refused(url: str, opened: Open, workload: Workload, machine: Machine) -> None:
    store = opened(url)
    store.open_study("s", workload, machine)
    store.add_probe("s", CANDIDATE, OK)
    with pytest.raises(SettingsError, match=r"another machine: machine\.nodes 1 → 2$"):
        store.open_study("s", workload, dataclasses.replace(machine, nodes=2, headroom=0.5))


def test_a_study_in_which_nothing_was_measured_takes_another_workload_and_machine(
    url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    store = opened(url)
    store.open_study("s", dataclasses.replace(workload, seq_len=256), machine)
    larger = dataclasses.replace(machine, nodes=2)
    opened_again = store.open_study("s", workload, larger)
    assert (opened_again.workload, opened_again.machine) == (workload, larger)
    assert store.study("s") == opened_again


def test_another_headroom_is_welcome_and_kept(url: str, opened: Open, workload: Workload, machine: Machine) -> None:
    store = opened(url)
    store.open_study("s", workload, machine)
    assert store.open_study("s", workload, dataclasses.replace(machine, headroom=0.2)).machine.headroom == 0.2
    assert store.study("s").machine.headroom == 0.2


def test_a_study_that_is_not_there_is_told_with_those_that_are(
    url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    store = opened(url)
    with pytest.raises(SettingsError, match="there is no study nope") as caught:
        store.study("nope")
    assert caught.value.hint == "the store holds no study yet"
    store.open_study("tiny", workload, machine)
    with pytest.raises(SettingsError) as caught:
        store.study("nope")
    assert caught.value.hint == "there are: tiny"


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_a_name_that_no_column_takes_is_refused(
    name: str, file_url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    with pytest.raises(SettingsError, match="1 to 255 characters"):
        opened(file_url).open_study(name, workload, machine)


def test_only_real_measurements_that_say_something_lasting_are_reused(
    url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    store = opened(url)
    store.open_study("s", workload, machine)
    oom = Measurement(Outcome.OOM_DEVICE, "table")
    store.add_probe("s", CANDIDATE, oom, reuse_key="inferred", inferred=True)
    store.add_probe("s", CANDIDATE, OK, reuse_key="reused", reused=True)
    for outcome in Outcome:
        store.add_probe("s", CANDIDATE, Measurement(outcome, "table"), reuse_key=outcome.value)
    assert store.reusable("inferred") is None
    assert store.reusable("reused") is None
    assert store.reusable("unheard of") is None
    found = {outcome for outcome in Outcome if store.reusable(outcome.value)}
    assert found == {Outcome.OK, Outcome.OOM_DEVICE, Outcome.OOM_HOST, Outcome.INVALID}


def test_optuna_keeps_its_tables_in_the_same_database(url: str, opened: Open) -> None:
    import optuna

    store = opened(url)
    storage = store.optuna_storage()
    assert storage is store.optuna_storage()
    optuna.create_study(storage=storage, study_name="s/x")
    names = optuna.get_all_study_names(opened(url).optuna_storage())
    assert names == ["s/x"]


def test_processes_that_start_together_on_an_empty_database_do_not_collide(url: str) -> None:
    code = textwrap.dedent(
        """
        import sys
        from autotune.machine.machine import Machine
        from autotune.store.store import Store
        from autotune.workload.workload import Model, Workload
        store = Store.open(sys.argv[1])
        store.crew("s", "family").join()
        store.open_study("s", Workload(Model("m")), Machine("cpu"))
        store.optuna_storage()
        """
    )
    starting = [
        subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    errors = [process.communicate()[1] for process in starting]
    assert [process.returncode for process in starting] == [0, 0, 0], errors
