"""What a probe costs beside its warm-up, tape and measured steps: warm and cold, side by side from one run."""

from __future__ import annotations

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.spread import median_spread
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.settings import compose_settings
from autotune.space.space import Space
from autotune.tune import fitted_buckets

WARM, COLD = 15, 3


def main() -> None:
    """Probe the baseline and one candidate of each other stage in turn, and print overhead and wall time."""
    rows: dict[str, list[Measurement]] = {}
    for name, rounds in (("warm", WARM), ("cold", COLD)):
        settings = compose_settings(["machine=cpu", f"launcher={name}"])
        prober = TorchrunProber(settings, make_launcher(settings))
        space = Space(fitted_buckets(settings, prober.describe()) or settings)
        turns = [next(c for c in space.candidates if _plain(c) and c.zero_stage == stage) for stage in (1, 2, 0, 3)]
        prober.probe(ProbeRequest(turns[0], settings.probe.steps))  # the first one starts what the others share
        measured = [prober.probe(ProbeRequest(turns[i % len(turns)], settings.probe.steps)) for i in range(rounds)]
        prober.close()
        rows[name] = measured
    for name, measured in rows.items():
        assert all(m.outcome is Outcome.OK for m in measured), [m.message for m in measured]
        overhead = median_spread([m.overhead_s or 0.0 for m in measured])
        wall = median_spread([m.wall_s for m in measured])
        print(
            f"{name}  overhead {overhead[0]:6.2f} s ({overhead[1]:.2f}–{overhead[2]:.2f})   "
            f"wall {wall[0]:6.2f} s ({wall[1]:.2f}–{wall[2]:.2f})   {len(measured)} probes of gpt_tiny after the first"
        )
    warm, cold = (median_spread([m.overhead_s or 0.0 for m in rows[name]])[0] for name in ("warm", "cold"))
    print(f"cold / warm overhead: {cold / warm:.1f}")


def _plain(candidate: Candidate) -> bool:
    return (
        candidate.micro_batch == 4
        and candidate.offload_optimizer is None
        and candidate.offload_param is None
        and candidate.checkpoint_blocks == "none"
    )
