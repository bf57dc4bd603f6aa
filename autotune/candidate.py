"""One value for every knob, in canonical form: equal programs have equal keys."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one probe runs. `None` means that the knob has no effect beside the others, or is not set.

    Sizes are counted as DeepSpeed counts them: buckets and stage-3 sizes in elements. `micro_batch` is sequences
    per device and micro-step, `accumulation` micro-steps per optimizer step.
    """

    micro_batch: int
    accumulation: int
    zero_stage: int
    precision: str
    offload_optimizer: str | None = None
    offload_param: str | None = None
    checkpoint_blocks: str = "none"
    checkpoint_part: str | None = None
    checkpoint_input: str | None = None
    overlap_comm: bool | None = None
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    stage3_prefetch_bucket_size: int | None = None
    stage3_param_persistence_threshold: int | None = None
    stage3_max_live_parameters: int | None = None
    stage3_max_reuse_distance: int | None = None
    zero_hpz_partition_size: int | None = None
    expandable_segments: bool | None = None
    garbage_collection_threshold: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """The candidate that `to_dict` wrote."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The knobs that have an effect, by name: what the store keeps and people read."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def key(self) -> str:
        """12 hexadecimal digits that are equal exactly when two canonical candidates are."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def replace(self, **changes: Any) -> Candidate:
        """A copy with some knobs changed (canonical form is the caller's concern)."""
        return dataclasses.replace(self, **changes)

    def differences(self, other: Candidate) -> dict[str, tuple[Any, Any]]:
        """The knobs that differ, as name: (mine, theirs)."""
        return {
            field.name: (mine, theirs)
            for field in dataclasses.fields(self)
            if (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        }

    def label(self, names: Collection[str] = ()) -> str:
        """A short line for people, e.g. `mb 4 × acc 2  z3  bf16  offload opt→cpu  ckpt half/whole`.

        Args:
            names: of the knobs beside the core ones that are to be shown too: those that vary where it is read.
        """
        parts = [f"mb {self.micro_batch} × acc {self.accumulation}", f"z{self.zero_stage}", self.precision]
        offloaded = [
            f"{short}→{device}"
            for short, device in (("opt", self.offload_optimizer), ("param", self.offload_param))
            if device
        ]
        if offloaded:
            parts.append("offload " + "+".join(offloaded))
        if self.checkpoint_blocks != "none":
            where = "" if self.checkpoint_input == "device" else f"→{self.checkpoint_input}"
            parts.append(f"ckpt {self.checkpoint_blocks}/{self.checkpoint_part}{where}")
        parts += [f"{name}={value}" for name, value in self.to_dict().items() if name in names and name not in CORE]
        return "  ".join(parts)

    def __str__(self) -> str:
        return self.label()


CORE = frozenset(
    {
        "micro_batch",
        "accumulation",
        "zero_stage",
        "precision",
        "offload_optimizer",
        "offload_param",
        "checkpoint_blocks",
        "checkpoint_part",
        "checkpoint_input",
    }
)
"""The knobs that every label shows."""


def varying(candidates: Iterable[Candidate]) -> list[str]:
    """The knobs that are not the same in all candidates that have them, in the order of the fields."""
    values: dict[str, set[Any]] = {}
    for candidate in candidates:
        for name, value in candidate.to_dict().items():
            values.setdefault(name, set()).add(value)
    return [field.name for field in dataclasses.fields(Candidate) if len(values.get(field.name, ())) > 1]
