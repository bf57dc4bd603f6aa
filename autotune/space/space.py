"""Which candidates exist: the knobs' choices, less what DeepSpeed would refuse, each program once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autotune.candidate import Candidate
from autotune.errors import NothingFeasible, SettingsError
from autotune.settings import Settings
from autotune.space.binding import Binder
from autotune.space.knobs import BY_NAME, KNOBS, Value, listed
from autotune.space.rules import BY_ID
from autotune.space.rules_batch import IDENTITY

MAX_CANDIDATES = 1_000_000
_FREE_ACCUMULATION: list[Value] = [1, 2, 4, 8, 16]
_BASELINE: dict[str, Value] = {
    "zero_stage": 1,
    "offload_optimizer": None,
    "offload_param": None,
    "checkpoint_blocks": "none",
    "accumulation": 1,
    "micro_batch": 1,
}


@dataclass
class Ledger:
    """How many combinations the space lists, how many each rule removed, how many candidates remain.

    `combinations` is always the sum of `removed` and `remaining`.
    """

    combinations: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    remaining: int = 0

    def remove(self, rule: str, count: int) -> None:
        """Count combinations that a rule removed."""
        self.removed[rule] = self.removed.get(rule, 0) + count

    def summary(self) -> str:
        """Several lines for people: combinations, what each rule removed and why, what remains."""
        width = len(f"{self.combinations:,}")
        lines = [f"{self.combinations:>{width},} combinations"]
        lines += [
            f"{-count:>{width + 1},} {rule}: {BY_ID[rule].sentence}"
            for rule, count in sorted(self.removed.items(), key=lambda item: -item[1])
        ]
        return "\n".join([*lines, f"{self.remaining:>{width},} candidates"])


class Space:
    """The candidates of one sweep.

    Attributes:
        knobs: the choices of every knob that a sampler draws, in canonical order. `accumulation` is among them only
            where the workload leaves the global batch free; None is "none", or "DeepSpeed's default for the stage".
        candidates: canonical and distinct, in trying order: micro_batch rises while the other knobs stay.
        ledger: how the combinations of `knobs` became the candidates.
    """

    def __init__(self, settings: Settings) -> None:
        """Enumerate the candidates.

        Raises:
            SettingsError: a knob cannot mean anything, nothing divides the global batch, or there are too many.
            NothingFeasible: DeepSpeed refuses every combination.
        """
        self._workload, self._machine = settings.workload, settings.machine
        self._binder = Binder(self._workload, self._machine)
        given = listed(settings.space, self._machine.devices_per_node)
        self._accumulations = given.pop("accumulation", None)
        self.knobs = {
            knob.name: given.get(knob.name, [self._default(knob.name)]) for knob in KNOBS if knob.name != "accumulation"
        }
        if self._workload.global_batch is None:
            self.knobs["accumulation"] = self._accumulations or _FREE_ACCUMULATION
            self.knobs["micro_batch"] = self.knobs.pop("micro_batch")
        self.knobs["micro_batch"] = sorted(self.knobs["micro_batch"], key=lambda value: int(value or 0))
        self._check(settings.space.nvme_path)
        self.ledger = Ledger(math.prod(len(values) for values in self.knobs.values()))
        self.candidates: list[Candidate] = []
        for candidate in self._walk():
            self.candidates.append(candidate)
            if len(self.candidates) > MAX_CANDIDATES:
                raise SettingsError(
                    f"the space has more than {MAX_CANDIDATES:,} candidates",
                    "fix some knobs: " + ", ".join(f"space.{name}=…" for name in self._longest()),
                )
        self.ledger.remaining = len(self.candidates)
        if not self.candidates:
            raise NothingFeasible("DeepSpeed refuses every combination of this space", self.ledger.summary())
        self._known = frozenset(self.candidates)

    def __contains__(self, candidate: object) -> bool:
        return candidate in self._known

    def canonical(self, raw: Mapping[str, Value]) -> Candidate | None:
        """The candidate that one combination comes down to; None where a rule refuses it.

        Args:
            raw: values by knob; a knob that is left out takes the first of its choices.
        """
        bound: dict[str, Value] = {}
        for name, values in self.knobs.items():
            outcome = self._binder.bind(name, raw.get(name, values[0]), bound)
            if outcome.refused:
                return None
            bound[name] = outcome.value
        return self._candidate(bound)

    def raw(self, candidate: Candidate) -> dict[str, Value]:
        """A combination of `knobs` that comes down to the candidate.

        Raises:
            KeyError: the candidate does not lie in this space (see `in`).
        """
        if candidate not in self:
            raise KeyError(candidate.key)
        bound: dict[str, Value] = {}
        raw: dict[str, Value] = {}
        for name, values in self.knobs.items():
            wanted = getattr(candidate, name)
            raw[name] = next(value for value in values if self._leads(name, value, bound, wanted))
            bound[name] = wanted
        return raw

    @cached_property
    def baseline(self) -> Candidate:
        """What a person would write first: stage 1, nothing offloaded or checkpointed, micro-batch 1.

        The other knobs have the first of their choices, precision the workload's own where that is listed. The
        baseline need not lie in the space.
        """
        own = self._workload.precision
        baseline = self.canonical(_BASELINE | ({"precision": own} if own in self.knobs["precision"] else {}))
        if baseline is None:
            raise NothingFeasible("DeepSpeed refuses the untuned default beside this space's other knobs")
        return baseline

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits that are equal exactly when two spaces have equal knobs and choices."""
        text = json.dumps([self.knobs, self._accumulations], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _leads(self, name: str, value: Value, bound: Mapping[str, Value], wanted: Value) -> bool:
        outcome = self._binder.bind(name, value, bound)
        return not outcome.refused and outcome.value == wanted

    def _default(self, name: str) -> Value:
        return self._workload.precision if name == "precision" else BY_NAME[name].default

    def _walk(self) -> Iterator[Candidate]:
        """Every candidate once, depth first; what a rule removes goes to the ledger, a whole subtree at a time."""
        names = list(self.knobs)
        below = [math.prod(len(self.knobs[name]) for name in names[depth + 1 :]) for depth in range(len(names))]

        def descend(depth: int, bound: dict[str, Value]) -> Iterator[Candidate]:
            if depth == len(names):
                candidate = self._candidate(bound)
                if candidate is None:
                    self.ledger.remove(IDENTITY.id, 1)
                else:
                    yield candidate
                return
            name = names[depth]
            seen: dict[Value, str | None] = {}
            for value in self.knobs[name]:
                outcome = self._binder.bind(name, value, bound)
                rule = outcome.rule.id if outcome.rule else None
                if outcome.refused or outcome.value in seen:
                    self.ledger.remove(rule or seen[outcome.value] or "", below[depth])
                    continue
                seen[outcome.value] = rule
                yield from descend(depth + 1, {**bound, name: outcome.value})

        return descend(0, {})

    def _candidate(self, bound: Mapping[str, Value]) -> Candidate | None:
        """The candidate of bound knobs, accumulation derived; None where the global batch does not divide."""
        values = dict(bound)
        batch = self._workload.global_batch
        if batch is not None:
            accumulation, rest = divmod(batch, int(values["micro_batch"] or 1) * self._machine.world_size)
            if rest or accumulation == 0 or (self._accumulations and accumulation not in self._accumulations):
                return None
            values["accumulation"] = accumulation
        return Candidate.from_dict(values)

    def _check(self, nvme_path: str | None) -> None:
        """Refuse what the knobs cannot mean together."""
        for name in ("offload_optimizer", "offload_param"):
            if "nvme" in self.knobs[name] and not nvme_path:
                raise SettingsError(
                    f"space.{name} lists nvme, and space.nvme_path is not set", "space.nvme_path=/local_nvme"
                )
        batch = self._workload.global_batch
        if batch is None:
            return
        world = self._machine.world_size
        per_step = [int(micro or 1) * world for micro in self.knobs["micro_batch"]]
        if self._accumulations:
            units = sorted({step * int(times or 1) for step in per_step for times in self._accumulations})
            near = [unit for unit in units if unit <= batch][-1:] + [unit for unit in units if unit >= batch][:1]
        else:
            below = [batch // step * step for step in per_step if step <= batch]
            near = sorted({*([max(below)] if below else []), min(-(-batch // step) * step for step in per_step)})
        if batch not in near:
            raise SettingsError(
                f"no micro-batch of the space divides workload.global_batch={batch} on {world} devices",
                f"nearest that work: {', '.join(f'workload.global_batch={size}' for size in near)}; "
                "or list other values in space.micro_batch, or leave the batch free with workload.global_batch=null",
            )

    def _longest(self) -> list[str]:
        return sorted(self.knobs, key=lambda name: -len(self.knobs[name]))[:3]
