"""The table prober: measurements that are known beforehand, so that a search needs no processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest


class TableProber:
    """Looks candidates up.

    Args:
        table: a function of the candidate, or measurements by candidate key. A candidate that a mapping lacks ends as
            `infra`: a hole in the table says nothing about the candidate.
    """

    kind = "table"

    def __init__(self, table: Callable[[Candidate], Measurement] | Mapping[str, Measurement]) -> None:
        self._table = table
        self.requests: list[ProbeRequest] = []

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        """Everything is known already."""

    def probe(self, request: ProbeRequest) -> Measurement:
        """The table's measurement; `stopped` where the request says that its throughput is not enough."""
        self.requests.append(request)
        measurement = self._look_up(request.candidate)
        enough = request.stop_below_tokens_per_s
        speed = measurement.tokens_per_s
        if measurement.outcome is Outcome.OK and not request.confirmation and enough is not None and speed is not None:
            bound = measurement.tokens_per_s_high or speed
            if bound < enough:
                return replace(measurement, outcome=Outcome.STOPPED, tokens_per_s=bound)
        return measurement

    def _look_up(self, candidate: Candidate) -> Measurement:
        if not isinstance(self._table, Mapping):
            return self._table(candidate)
        found = self._table.get(candidate.key)
        return found or Measurement(Outcome.INFRA, self.kind, message=f"the table has no candidate {candidate.key}")

    def close(self) -> None:
        """Nothing is kept between probes."""
