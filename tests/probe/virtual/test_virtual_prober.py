"""What the virtual prober predicts, what it keeps, and that shortcuts change nothing."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import GIB
from autotune.probe.measurement import VIRTUAL, Measurement, Outcome
from autotune.probe.virtual import prober as prober_module
from autotune.probe.virtual import tapes as tapes_module
from autotune.probe.virtual.allocator import AllocatorSettings
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.prediction import Verdict
from autotune.probe.virtual.prober import VirtualProber
from autotune.probe.virtual.replay import replay
from autotune.probe.virtual.tape import Tape
from autotune.probe.virtual.tapes import Program, Tapes
from autotune.search.frontier import implies
from autotune.settings import compose_settings
from autotune.space.config import deepspeed_config
from autotune.space.space import Space
from autotune.workload.phase import Phase
from tests.probe.torchrun.conftest import CHECKPOINTED, PLAIN, STAGES

from .conftest import SMALL, CountingTracer, MakeProber, probe

STAGE3 = PLAIN.replace(**STAGES[3])
CHEAP = PLAIN.replace(**STAGES[0], micro_batch=1, accumulation=1)
TWO = "machine.devices_per_node=2"


class NoProcess(Tracer):
    """A tracer that must not be needed."""

    def __init__(self) -> None:
        pass

    def _started(self) -> Any:
        raise AssertionError("a process is started")


def tapes_of(prober: VirtualProber) -> Tapes:
    return prober._ready().tapes


def program_of(prober: VirtualProber, candidate: Candidate, rank: int = 0) -> Program:
    return Program(candidate, prober._config(candidate), rank)


def timeless(measurement: Measurement) -> Measurement:
    return dataclasses.replace(measurement, wall_s=0.0)


def test_a_prediction_has_every_figure(prober: MakeProber) -> None:
    made = prober("machine.nodes=2", TWO)
    candidate = PLAIN.replace(micro_batch=1)
    found = probe(made, candidate)
    assert (found.outcome, found.probe_kind, found.message) == (Outcome.OK, VIRTUAL, None)
    assert found.predicted
    assert found.step_s is not None
    assert found.step_s > 0
    assert found.tokens_per_s == found.tokens_per_s_low == found.tokens_per_s_high
    assert found.tokens_per_s == pytest.approx(2 * 4 * 64 / found.step_s)
    assert found.peak_allocated_bytes is not None
    assert found.peak_reserved_bytes is not None
    assert found.device_total_bytes is not None
    assert 0 < found.peak_allocated_bytes <= found.peak_reserved_bytes < found.device_total_bytes
    assert list(found.memory) == ["load", "init", "first_step", "forward", "backward", "step"]
    assert found.worst_rank in range(4)
    prediction = made.predict(candidate)
    assert found.detail["prediction"] == prediction.to_dict()
    assert prediction.verdict is Verdict.FITS
    assert set(prediction.ranks) == {0, 1, 2, 3}
    assert {"parameters", "optimizer state", "communication buffers"} <= {h.kind for h in prediction.holders}
    json.dumps(found.to_dict())


class TestVerdicts:
    @pytest.mark.parametrize(
        ("share", "verdict"), [(1.2, Verdict.FITS), (1.01, Verdict.AT_RISK), (0.9, Verdict.DOES_NOT_FIT)]
    )
    def test_are_drawn_by_the_machines_memory_and_headroom(
        self, prober: MakeProber, share: float, verdict: Verdict
    ) -> None:
        needs = prober().predict(CHEAP).device_total
        found = prober(f"machine.device_memory_gib={needs * share / GIB}").predict(CHEAP)
        assert found.verdict is verdict
        assert (found.oom is not None) == (verdict is Verdict.DOES_NOT_FIT)

    def test_of_a_device_that_is_full_is_its_oom(self, prober: MakeProber) -> None:
        found = probe(prober("machine.device_memory_gib=0.626"), CHEAP)  # the context alone takes as much
        assert (found.outcome, found.phase) == (Outcome.OOM_DEVICE, Phase.LOAD)
        assert found.needed_bytes is not None
        assert found.message is not None
        assert found.message.endswith("are reserved")
        assert found.tokens_per_s is None

    def test_of_a_node_that_is_full_is_an_oom_of_the_host(self, prober: MakeProber) -> None:
        offloaded = PLAIN.replace(offload_optimizer="cpu")
        made = prober("machine.host_memory_gib=0.01")
        found = probe(made, offloaded)
        assert found.outcome is Outcome.OOM_HOST
        assert found.needed_bytes == found.host_peak_bytes
        assert found.host_peak_bytes is not None
        states = 12 * (made.describe().parameters or 0)
        assert states < found.host_peak_bytes < 3 * states
        assert "host memory" in (found.message or "")
        assert probe(prober(), offloaded).outcome is Outcome.OK

    def test_saved_inputs_on_the_host_are_pinned_there(self, prober: MakeProber) -> None:
        kept, moved = (
            prober().predict(PLAIN.replace(**CHECKPOINTED | {"checkpoint_input": where})) for where in ("device", "cpu")
        )
        inputs = 2 * (2 * 64 * 128 * 2)  # two blocks, micro-batch 2, bf16
        assert moved.phases["backward"].pinned - kept.phases["backward"].pinned == inputs
        assert moved.peak_allocated < kept.peak_allocated

    def test_of_an_emulated_device_does_not_count_what_is_on_the_host(self, prober: MakeProber) -> None:
        made = prober("machine=cpu", SMALL[2], tracer=None)
        plain, offloaded = (made.predict(PLAIN.replace(offload_optimizer=where)) for where in (None, "cpu"))
        made.close()
        assert plain.host_per_node == 0
        assert offloaded.peak_allocated < plain.peak_allocated
        assert offloaded.host_per_node > 0


class TestTheCache:
    def test_answers_the_same_again(self, prober: MakeProber, tracer: CountingTracer) -> None:
        made = prober()
        first, runs = probe(made, CHEAP), tracer.runs
        assert timeless(probe(made, CHEAP)) == timeless(first)
        assert tracer.runs == runs

    def test_of_another_process_is_used_without_a_tracing_process(self, prober: MakeProber) -> None:
        first = probe(prober(), CHEAP)
        made = prober(tracer=NoProcess())
        made.prepare([CHEAP], lambda done, of: None)
        assert timeless(probe(made, CHEAP)) == timeless(first)

    def test_is_not_used_for_another_workload_or_machine(self, prober: MakeProber, tracer: CountingTracer) -> None:
        probe(prober(), CHEAP)
        for override in ("workload.seq_len=32", TWO):
            runs = tracer.runs
            probe(prober(override), CHEAP)
            assert tracer.runs > runs, override

    def test_is_not_used_by_other_code(
        self, prober: MakeProber, tracer: CountingTracer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, runs = probe(prober(), CHEAP), tracer.runs
        for module in (tapes_module, prober_module):
            monkeypatch.setattr(module, "code_digest", lambda: "another version")
        assert timeless(probe(prober(), CHEAP)) == timeless(first)
        assert tracer.runs > runs

    def test_is_not_used_for_a_custom_model_that_was_changed(
        self, prober: MakeProber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = (Path(__file__).parent / "models.py").read_text()
        monkeypatch.chdir(tmp_path)
        base = ("model=custom", "model.factory=written:build", *SMALL[1:3], "workload.seq_len=32", SMALL[-1])
        found = []
        for width in (64, 128):
            Path("written.py").write_text(source.replace("WIDTH, LENGTH = 64", f"WIDTH, LENGTH = {width}"))
            found.append(prober(base=base).predict(CHEAP).peak_allocated)
        assert found[0] < found[1]

    def test_that_is_broken_is_written_anew(
        self, prober: MakeProber, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prober_module, "cache_folder", lambda: tmp_path)
        first = prober().predict(CHEAP)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} == {".npz", ".json"}
        for path in files:
            path.write_bytes(path.read_bytes()[:100])
        assert prober().predict(CHEAP) == first


class TestWhatDoesNotRun:
    def test_what_deepspeed_refuses_is_invalid_in_its_words(self, prober: MakeProber) -> None:
        found = probe(prober(TWO), PLAIN.replace(allgather_bucket_size=2_000_001))
        assert (found.outcome, found.phase) == (Outcome.INVALID, Phase.INIT)
        assert found.message == (
            "AssertionError: allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2"
        )

    def test_a_config_that_deepspeed_cannot_read_is_refused_in_its_words(self, prober: MakeProber) -> None:
        made = prober()
        settings = compose_settings([*SMALL])
        config = deepspeed_config(PLAIN, settings.workload, settings.machine)
        config["zero_optimization"]["nonsense"] = 1
        with pytest.raises(Exception, match="nonsense: Extra inputs are not permitted"):
            made.predict(PLAIN, config)

    def test_stands_in_the_way_of_nobody_else(self, prober: MakeProber) -> None:
        made = prober(TWO)
        refused = PLAIN.replace(allgather_bucket_size=2_000_001, micro_batch=8)
        told: list[tuple[int, int]] = []
        made.prepare([refused, PLAIN.replace(micro_batch=4)], lambda done, of: told.append((done, of)))
        assert told[-1][0] == told[-1][1]
        assert all(0 <= done <= of for done, of in told)
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        outcomes = [probe(made, c).outcome for c in (refused, PLAIN.replace(micro_batch=4))]
        assert outcomes == [Outcome.INVALID, Outcome.OK]


@pytest.fixture(scope="module")
def found(tracer: CountingTracer, cache: Path) -> dict[Candidate, Measurement]:
    """A space of gpt_tiny on devices that a part of it does not fit."""
    outside = ("machine.context_mib=0", "machine.nccl_mib=0", "machine.device_memory_gib=0.055")
    knobs = (
        "space.micro_batch=[1,2,4,8,16]",
        "+space.accumulation=[1,2]",
        "space.offload_optimizer=none",
        "space.offload_param=none",
        "space.checkpoint_blocks=none",
        "space.reduce_bucket_size=500000",
        "space.allgather_bucket_size=500000",
    )
    settings = compose_settings([*SMALL, TWO, *outside, *knobs])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        # Every candidate by its own trace, although an OOM saves those of larger micro-batches.
        patch.setattr(Tapes, "_too_much", lambda self, trace: None)
        patch.setattr(tracer, "predict", lambda lines: None)
        made, candidates = VirtualProber(settings, tracer=tracer), Space(settings).candidates
        made.prepare(candidates, lambda done, of: None)
        return {candidate: probe(made, candidate) for candidate in candidates}


class TestTheOomFrontier:
    """Design: an OOM implies another where every other knob is equal, towards larger micro-batch."""

    def test_has_candidates_on_both_sides(self, found: dict[Candidate, Measurement]) -> None:
        counts = Counter(measurement.outcome for measurement in found.values())
        assert set(counts) == {Outcome.OK, Outcome.OOM_DEVICE}
        assert min(counts.values()) > len(found) / 6

    def test_holds_for_all_pairs(self, found: dict[Candidate, Measurement]) -> None:
        implied = [
            (a, b) for a, b in permutations(found, 2) if implies(a, b) and found[a].outcome is Outcome.OOM_DEVICE
        ]
        assert len(implied) > 30
        for a, b in implied:
            assert found[b].outcome is Outcome.OOM_DEVICE, (str(a), str(b))

    def test_memory_grows_with_the_micro_batch(self, found: dict[Candidate, Measurement]) -> None:
        for a, b in permutations(found, 2):
            same = a.replace(micro_batch=b.micro_batch) == b and a.micro_batch < b.micro_batch
            if same and found[a].outcome is found[b].outcome is Outcome.OK:
                one, two = found[a].peak_allocated_bytes, found[b].peak_allocated_bytes
                assert one is not None
                assert two is not None
                assert one <= two, (str(a), str(b))


def assert_equal(one: Tape, two: Tape) -> None:
    assert one.names == two.names
    np.testing.assert_array_equal(one.rows, two.rows)
    assert (one.roles, one.facts) == (two.roles, two.facts)


@pytest.mark.parametrize("zero_stage", STAGES)
def test_a_large_micro_batch_is_what_its_own_trace_says(
    prober: MakeProber, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prober()
    program = program_of(made, PLAIN.replace(micro_batch=12, **STAGES[zero_stage]))
    affine = tapes_of(made).tape(program)
    monkeypatch.setattr(tapes_module, "TRACED", (98, 99))
    assert [trace.micro_batch for trace in tapes_of(made).needed(program)] == [12]
    assert_equal(affine, tapes_of(made).tape(program))


def test_a_deep_model_is_what_its_full_trace_says(prober: MakeProber) -> None:
    deep = STAGE3.replace(
        accumulation=1,
        stage3_max_live_parameters=200_000,
        stage3_max_reuse_distance=200_000,
        stage3_prefetch_bucket_size=100_000,
        stage3_param_persistence_threshold=100,
        reduce_bucket_size=100_000,
    )
    overrides = ("model.config.num_hidden_layers=24", "workload.seq_len=32")
    made, full = prober(*overrides), prober(*overrides)
    extended = tapes_of(made).tape(program_of(made, deep))
    tapes_of(full).blocks = 0
    assert_equal(extended, tapes_of(full).tape(program_of(full, deep)))


@pytest.mark.parametrize(("zero_stage", "accumulation"), [(1, 1), (2, 1)])
def test_the_rank_that_is_reported_needs_most(
    prober: MakeProber, zero_stage: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    made = prober(
        base=("model=custom", "model.factory=models:uneven", "machine=a100_80g", "workload.seq_len=32", SMALL[-1])
    )
    candidate = PLAIN.replace(**STAGES[zero_stage], accumulation=accumulation, reduce_bucket_size=20_000)
    found = probe(made, candidate)
    tapes, machine = tapes_of(made), made._machine
    programs = [program_of(made, candidate, rank) for rank in range(machine.world_size)]
    tapes.trace(trace for program in programs for trace in tapes.needed(program))
    peaks = [replay(tapes.tape(program), machine, AllocatorSettings()).peak_allocated for program in programs]
    assert len(set(peaks)) > 1
    assert found.worst_rank is not None
    assert found.peak_allocated_bytes == peaks[found.worst_rank]
    assert found.peak_allocated_bytes == max(peaks)  # and no more than four of eight were looked at


MODELS = {
    "gpt2_xl": ("model.config.n_layer=2", "model.config.n_embd=400"),
    "llama3_8b": ("model.config.num_hidden_layers=2", "model.config.vocab_size=8000"),
    "qwen2_7b": ("model.config.num_hidden_layers=2", "model.config.vocab_size=8000"),
    "mixtral_8x7b": ("model.config.num_hidden_layers=2",),
}


@pytest.mark.parametrize("model", MODELS)
def test_published_models_are_traced_in_all_stages(prober: MakeProber, model: str) -> None:
    made = prober(
        base=(f"model={model}", "machine=a100_80g", "machine.device_memory_gib=10000", *MODELS[model], *SMALL[-2:])
    )
    candidates = [PLAIN.replace(accumulation=1, **knobs | CHECKPOINTED) for knobs in STAGES.values()]
    made.prepare(candidates, lambda done, of: None)
    for candidate in candidates:
        found = probe(made, candidate)
        assert found.outcome is Outcome.OK, (found.message, found.detail)
        kinds = {holder["kind"] for holder in found.detail["prediction"]["holders"]}
        assert {"parameters", "activations"} <= kinds
