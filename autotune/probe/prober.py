"""The Prober protocol: candidate in, measurement out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement

if TYPE_CHECKING:
    from autotune.probe.torchrun.describe import Description


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One probe to run.

    Attributes:
        candidate: what to run.
        steps: measured optimizer steps after the warm-up.
        confirmation: a longer measurement of a finalist: accumulation is run in full, nothing ends it early.
        stop_below_tokens_per_s: a probe whose best step so far cannot reach this may end as `stopped`.
    """

    candidate: Candidate
    steps: int
    confirmation: bool = False
    stop_below_tokens_per_s: float | None = None


class Prober(Protocol):
    """Measures or predicts candidates, one at a time.

    `kind` is `torchrun`, `virtual` or `table` and is kept with every measurement.
    """

    kind: str

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        """Be told which candidates are going to be asked for; only a prober that can work ahead makes use of it.

        Args:
            candidates: in the order in which they will be asked for.
            on_progress: takes how much of the work ahead is done, and of how much.
        """
        ...

    def probe(self, request: ProbeRequest) -> Measurement:
        """Run one probe to its end. Trouble of ours is a measurement with outcome `infra`.

        Raises:
            KeyboardInterrupt: the user interrupted; everything that the probe started is gone by then.
        """
        ...

    def close(self) -> None:
        """End whatever is kept between probes."""
        ...


class ModelProber(Prober, Protocol):
    """A prober that runs the workload's own model."""

    @property
    def protocol(self) -> dict[str, Any]:
        """How it is measured or predicted: what comes of different protocols is not the same."""
        ...

    @property
    def threads(self) -> int:
        """Processor threads of each rank."""
        ...

    def describe(self) -> Description:
        """What is known of the model before it is probed; looked up once.

        Raises:
            InfraError: the process that looks does not start.
        """
        ...
