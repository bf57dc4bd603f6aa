"""A rule: one thing that DeepSpeed refuses, ignores or changes, as data; and the situation that a rule looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ZERO = "zero_optimization."
MISSING = object()


class Kind(StrEnum):
    """What DeepSpeed does: raise, behave as if the key were not there, or use another value than the one written."""

    REFUSE = "refuse"
    IGNORE = "ignore"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Situation:
    """A DeepSpeed config, whole or in part, and where it would run.

    Attributes:
        config: as in the JSON file.
        world_size: ranks in all.
        accelerator: `cpu` or `cuda`.
        knobs: the knobs that DeepSpeed's config has no key for, by name.
    """

    config: Mapping[str, Any]
    world_size: int = 1
    accelerator: str = "cuda"
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def get(self, path: str, default: Any = None) -> Any:
        """What the config, or else the knobs, say at a dotted path; a section's `"auto"` counts as not said."""
        found: Any = self.config
        for name in path.split("."):
            if not isinstance(found, Mapping) or name not in found:
                found = self.knobs.get(path, default)
                break
            found = found[name]
        return default if found == "auto" and "." in path else found

    def has(self, path: str) -> bool:
        """Whether the config, or else the knobs, say anything at a dotted path (also where that is `"auto"`)."""
        return self.get(path, MISSING) is not MISSING

    @property
    def stage(self) -> int:
        """The ZeRO stage in effect."""
        stage = self.get(ZERO + "stage", 0)
        return stage if isinstance(stage, int) else 0

    @property
    def precision(self) -> str:
        """What the model computes in: bf16, fp16 or fp32."""
        for name in ("bf16", "bfloat16", "fp16"):
            if self.get(f"{name}.enabled", False) is True:
                return "fp16" if name == "fp16" else "bf16"
        return "fp32"

    @property
    def gradients(self) -> str:
        """What gradients are accumulated in: `data_types.grad_accum_dtype`, else the model's own type."""
        written = self.get("data_types.grad_accum_dtype")
        return self.precision if written is None else dtype(written)

    def offload(self, what: str) -> str:
        """The device of `offload_optimizer` or `offload_param`: none, cpu or nvme."""
        return str(self.get(f"{ZERO}offload_{what}.device", "none") or "none")


def dtype(name: Any) -> str:
    """DeepSpeed's several spellings of a type, as the short one."""
    spellings = {
        "fp16": ("fp16", "float16", "half", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
        "fp32": ("fp32", "float32", "float", "torch.float32"),
    }
    return next((short for short, long in spellings.items() if name in long), str(name))


def _always(situation: Situation) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that DeepSpeed refuses, ignores or changes.

    Attributes:
        id: short and stable; ledgers and findings are kept by it.
        kind: refuse, ignore or change.
        keys: the keys it speaks about: dotted paths of a DeepSpeed config, or names of our own knobs.
        when: whether it holds for these keys, in this situation.
        sentence: what a person reads.
        remedy: what to do instead.
        source: where this was read, file and function.
        versions: the DeepSpeed versions that it was found in.
        knobs: the knobs whose values decide; for `refuse`, all that `when` reads.
        becomes: for `change`, the value that is really used for the first key.
        where: for rules about keys that cannot be listed beforehand, the broken keys in this situation.
        note: the numbers behind the sentence, for this situation.
    """

    id: str
    kind: Kind
    keys: tuple[str, ...]
    sentence: str
    remedy: str
    source: str
    when: Callable[[Situation], bool] = _always
    versions: str = ">=0.19.6"
    knobs: tuple[str, ...] = ()
    becomes: Callable[[Situation], Any] | None = None
    where: Callable[[Situation], Iterable[str]] | None = None
    note: Callable[[Situation], str] | None = None

    def broken(self, situation: Situation) -> list[str]:
        """The keys for which the rule holds in this situation."""
        if self.where is not None:
            return list(self.where(situation))
        present = [key for key in self.keys if situation.has(key)]
        return present if present and self.when(situation) else []
