"""The default sweep on machine=cpu, and its winner against the untuned default in pairs run in turn."""

from __future__ import annotations

import tempfile
from collections import Counter

from autotune.probe.measurement import Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.spread import median_spread
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.settings import compose_settings
from autotune.store.store import Store
from autotune.tune import tune

PAIRS = 7


def main() -> None:
    """Sweep, then measure winner and baseline in turn and print the ratio pair by pair."""
    with tempfile.TemporaryDirectory() as folder:
        settings = compose_settings(["machine=cpu", f"output={folder}"])
        result, _ = tune(settings)
        store = Store.open(settings.store_url, create=False)
        probed = [p for p in store.probes(settings.study_name) if not p.inferred and not p.confirmation]
        store.close()
    outcomes = Counter(p.measurement.outcome for p in probed)
    print(f"\nprobes: {len(probed)}, of them really out of memory: {outcomes[Outcome.OOM_DEVICE]}")
    assert outcomes[Outcome.OOM_DEVICE] > 0
    assert result.baseline is not None
    prober = TorchrunProber(settings, make_launcher(settings))
    ratios = []
    for pair in range(PAIRS):
        order = [result.winner.candidate, result.baseline.candidate]
        speeds = {}
        for candidate in order if pair % 2 else reversed(order):
            measured = prober.probe(ProbeRequest(candidate, settings.probe.confirm_steps, confirmation=True))
            assert measured.outcome is Outcome.OK, measured.message
            speeds[candidate] = measured.tokens_per_s or 0.0
        ratios.append(speeds[order[0]] / speeds[order[1]])
        print(f"pair {pair + 1}: winner {speeds[order[0]]:,.0f}, baseline {speeds[order[1]]:,.0f} tokens/s", flush=True)
    prober.close()
    median, low, high = median_spread(ratios)
    print(f"winner / baseline: {median:.2f} ({low:.2f}–{high:.2f}) over {PAIRS} pairs; {result.winner.candidate}")
    assert low > 1, "the winner is not faster than the untuned default by more than the spread"
