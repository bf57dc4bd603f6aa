"""Whether two candidates train alike: their losses and gradient norms on the same data, weights and global batch.

Two programs that compute the same in another order differ by rounding, and the steps carry it on. What was seen over
18 steps of gpt_tiny on two CPU ranks, between stages 0 to 3, micro-batches 1 to 16, with and without offload,
checkpointing and overlap, as the largest relative difference:

                  first loss   later losses   first norm   later norms
    bf16          5.5e-06      3.8e-05        2.7e-04      2.3e-02   (stage 0 against the others; without it 5e-03)
    bf16 to fp32  8.2e-06      3.6e-05        1.8e-04      2.4e-02
    fp32          2.3e-07      2.3e-07        1.1e-07      1.3e-07

The tolerances are a multiple of that: models are deeper than gpt_tiny, and learn. Half a percent of the loss is far
below what a wrong reduction of the loss does (factors), a tenth of the norm far below a wrong division of gradients
(factors too). Adam hides the scale of gradients from the losses, which is why norms are compared at all. fp16 runs on
no CPU; it has three more bits than bf16 and fewer exponents, and is given the same. Where precisions differ, the
coarser counts.

A loss that passes through zero, as the log-likelihood of densities does, is next to nothing there, and so would be what
rounding may do to it: differences of losses are shares of no less than a tenth of the reference's mean size.

A step's norm may be far off where its gradients nearly cancel, and a wrong division is wrong in every step: of the
later norms the median difference counts. DeepSpeed keeps no norm at stage 0 in fp32; then losses alone are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    first_loss: float
    loss: float
    first_norm: float
    norm: float


SIXTEEN_BITS = Tolerance(first_loss=5e-4, loss=5e-3, first_norm=2e-2, norm=1e-1)
TOLERANCES = {
    "fp32": Tolerance(first_loss=1e-5, loss=1e-4, first_norm=1e-3, norm=1e-2),
    "fp16": SIXTEEN_BITS,
    "bf16": SIXTEEN_BITS,
}
LEAST = 2
"""Fewer steps than that are no comparison."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one candidate did on the common data."""

    precision: str
    losses: Sequence[float]
    norms: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Parity:
    """What became of a comparison.

    Attributes:
        agrees: None where nothing could be compared.
        reason: one sentence, where they do not agree or could not be compared.
        steps: that were compared.
        first_loss, loss, first_norm, norm: the largest relative differences seen (`norm`: the median one); None where
            there was nothing to compare.
        tolerance: the limits.
    """

    agrees: bool | None
    reason: str | None
    steps: int
    first_loss: float | None
    loss: float | None
    first_norm: float | None
    norm: float | None
    tolerance: Tolerance

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def compare(mine: Trace, reference: Trace) -> Parity:
    """Compare a candidate with the reference, step by step, as far as both went."""
    tolerance = max((TOLERANCES[t.precision] for t in (mine, reference)), key=lambda t: t.loss)
    steps = min(len(mine.losses), len(reference.losses))
    if steps < LEAST:
        return unknown("too few steps were recorded to compare losses", tolerance)
    least = fmean(map(abs, reference.losses[:steps])) / 10
    losses = [difference(a, b, least) for a, b in zip(mine.losses, reference.losses, strict=False)]
    pairs = list(zip(mine.norms, reference.norms, strict=False))
    norms = [difference(a, b) if a is not None and b is not None else None for a, b in pairs]
    later = [norm for norm in norms[1:] if norm is not None]
    seen = {
        "first_loss": losses[0],
        "loss": max(losses[1:]),
        "first_norm": norms[0] if norms else None,
        "norm": median(later) if later else None,
    }
    for name, words in _WORDS.items():
        value, limit = seen[name], getattr(tolerance, name)
        if value is not None and not value <= limit:
            reason = f"it trains differently: {words} differs from the reference's by {_percent(value)}"
            return Parity(
                False, f"{reason}, and rounding explains {_percent(limit)}", steps, **seen, tolerance=tolerance
            )
    return Parity(True, None, steps, **seen, tolerance=tolerance)


def unknown(reason: str, tolerance: Tolerance = SIXTEEN_BITS) -> Parity:
    """That nothing could be compared, and why."""
    return Parity(None, reason, 0, None, None, None, None, tolerance)


def difference(a: float, b: float, least: float = 0.0) -> float:
    """How far apart two numbers are, as a share of the larger, or of `least` where that is larger still.

    Infinite where one of the two is no number.
    """
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), least) if a != b else 0.0


_WORDS = {
    "first_loss": "its first loss",
    "first_norm": "the norm of its first gradients",
    "loss": "a later loss",
    "norm": "the norm of its gradients",
}


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"
