"""How fast gpt20b is planned for 64 × A100-80G: one candidate and the whole space, cold and from the cache."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement
from autotune.probe.prober import ProbeRequest
from autotune.probe.virtual.allocator import AllocatorSettings
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.prediction import Prediction
from autotune.probe.virtual.prober import VirtualProber
from autotune.probe.virtual.replay import Replayed, replay
from autotune.probe.virtual.tape import Tape
from autotune.probe.virtual.tapes import Program, Tapes, Trace, cache_folder
from autotune.settings import Settings, compose_settings
from autotune.space.config import allocator_environment, deepspeed_config
from autotune.space.space import Space
from tests.bench.cache import empty_cache

OVERRIDES = ["model=gpt20b", "machine=a100_80g", "machine.nodes=8"]
ONE = {
    "zero_stage": 3,
    "micro_batch": 4,
    "offload_optimizer": None,
    "offload_param": None,
    "checkpoint_blocks": "all",
    "checkpoint_part": "whole",
    "checkpoint_input": "device",
}
MEMORY = ("peak_allocated", "peak_reserved")


class AsItIs(Tapes):
    """Traces every candidate in full depth and at its own micro-batch: nothing is extended."""

    def tape(self, program: Program) -> Tape:
        return self._load(Trace(program, program.candidate.micro_batch, None))


def main(most: int | None = None) -> None:
    """Print the seconds, the error of what is extended, and what comes of the space.

    Args:
        most: candidates of the space; None for all.
    """
    settings = compose_settings(OVERRIDES)
    one_candidate(settings)
    whole_space(settings, most)


def one_candidate(settings: Settings) -> None:
    """One candidate cold, and the same traced in full."""
    candidate = next(c for c in Space(settings).candidates if all(getattr(c, k) == v for k, v in ONE.items()))
    with empty_cache():
        prober = VirtualProber(settings)
        prober.describe()  # imports torch and DeepSpeed
        began = time.perf_counter()
        extended = prober.predict(candidate)
        seconds = time.perf_counter() - began
        prober.close()
        print(f"one candidate, cold: {seconds:.1f} s after the imports, {_traces()}; {candidate}", flush=True)
        began = time.perf_counter()
        full = in_full(settings, candidate)
    print(f"traced in full ({settings.model.config['num_hidden_layers']} layers): {time.perf_counter() - began:.1f} s")
    print("\n".join(_differences(extended, full)))


def in_full(settings: Settings, candidate: Candidate) -> Replayed:
    """What a full trace of rank 0 comes to."""
    config = json.dumps(deepspeed_config(candidate, settings.workload, settings.machine))
    tracer = Tracer(settings.machine, lambda text: None)
    try:
        tapes = AsItIs(settings.workload, settings.machine, tracer, None, cache_folder() / "full")
        tape = tapes.tape(Program(candidate, config, 0))
    finally:
        tracer.close()
    allocator = AllocatorSettings.parse(allocator_environment(candidate).get("PYTORCH_ALLOC_CONF", ""))
    return replay(tape, settings.machine, allocator)


def whole_space(settings: Settings, most: int | None) -> None:
    """Every candidate of the core space, cold and then with a new prober from the cache."""
    candidates = Space(settings).candidates
    chosen = candidates if most is None else candidates[:: max(1, len(candidates) // most)]
    with empty_cache():
        cold, found = planned(settings, chosen)
        traces = _traces()
        warm, again = planned(settings, chosen)
    assert [_lasting(m) for m in found] == [_lasting(m) for m in again]
    processors = len(os.sched_getaffinity(0))
    print(f"{len(chosen)} of {len(candidates)} candidates of the core space, on {processors} processors")
    print(f"cold: {cold:.1f} s after the imports, {cold / len(chosen):.2f} s a candidate, {traces}")
    print(f"from the cache, a new prober: {warm:.2f} s")
    outcomes = Counter(str(measurement.outcome) for measurement in found)
    print("outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    verdicts = Counter(m.detail["prediction"]["verdict"] for m in found if "prediction" in m.detail)
    print("verdicts: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))


def planned(settings: Settings, candidates: Sequence[Candidate]) -> tuple[float, list[Measurement]]:
    """(seconds after the imports, what is predicted) of candidates, with a prober of their own."""
    prober = VirtualProber(settings)
    try:
        prober.describe()
        began = time.perf_counter()
        prober.prepare(candidates, _progress)
        found = [prober.probe(ProbeRequest(candidate, settings.probe.steps)) for candidate in candidates]
        return time.perf_counter() - began, found
    finally:
        prober.close()


def _traces() -> str:
    """How many traces the cache holds, by depth."""
    folder = cache_folder() / "tapes"
    depths = Counter(Tape.load(path).facts.get("depth", 0) for path in folder.glob("*.npz"))
    refused = sum(1 for _ in folder.glob("*.error"))
    listed = ", ".join(f"{count} of {depth} layers" for depth, count in sorted(depths.items()))
    return f"{depths.total() + refused} traces ({listed}{f', {refused} refused' if refused else ''})"


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} traces", end="\n" if done == of else "", file=sys.stderr, flush=True)


def _lasting(measurement: Measurement) -> Measurement:
    return dataclasses.replace(measurement, wall_s=0.0)


def _differences(extended: Prediction, full: Replayed) -> list[str]:
    lines = []
    for name in MEMORY:
        mine, whole = getattr(extended, name), getattr(full, name)
        lines.append(
            f"{name.replace('_', ' '):<16}{mine / 1e9:8.3f} GB, in full {whole / 1e9:.3f} GB, {mine / whole - 1:+.3%}"
        )
    return lines
