"""A rule: one thing that DeepSpeed refuses, ignores or changes, as data; and the situation that a rule looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ZERO = "zero_optimization."
_MISSING = object()


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
        own_model: the model is the user's own code, which may call what a `transformers` model never calls.
    """

    config: Mapping[str, Any]
    world_size: int = 1
    accelerator: str = "cuda"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    own_model: bool = False

    def written(self, path: str) -> Any:
        """What the config, or else the knobs, say at a dotted path, as it is written; None where they say nothing."""
        found = self._find(path)
        return None if found is _MISSING else found

    def get(self, path: str, default: Any = None) -> Any:
        """What is in effect at a dotted path: inside sections, DeepSpeed takes `"auto"` as not written."""
        found = self._find(path)
        return default if found is _MISSING or found is None or (found == "auto" and "." in path) else found

    def has(self, path: str) -> bool:
        """Whether anything is written at a dotted path."""
        return self._find(path) is not _MISSING

    def section(self, path: str) -> Mapping[str, Any]:
        """The section at a dotted path; empty where there is none."""
        found = self._find(path)
        return found if isinstance(found, Mapping) else {}

    def _find(self, path: str) -> Any:
        found: Any = self.config
        for name in path.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return self.knobs.get(path, _MISSING)
            found = found[name]
        return found

    @property
    def stage(self) -> int:
        """The ZeRO stage in effect; `zero_optimization: true` is an old way to write stage 1."""
        stage = self.get(ZERO + "stage", 1 if self.written("zero_optimization") is True else 0)
        return int(stage) if str(stage) in ("0", "1", "2", "3", "1.0", "2.0", "3.0", "True") else 0

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
        written = self.written("data_types.grad_accum_dtype")
        return self.precision if written is None else dtype(written)

    @property
    def optimizer(self) -> str:
        """The optimizer's type in small letters; empty where the config names none."""
        return str(self.get("optimizer.type", "")).lower()

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed wraps the optimizer in its BF16_Optimizer, which reads few of ZeRO's keys."""
        return (
            self.stage == 1
            and self.precision == "bf16"
            and self.gradients == "fp32"
            and self.offload("optimizer") != "cpu"
        )

    def offload(self, what: str) -> str:
        """The device of `offload_optimizer` or `offload_param`: none, cpu or nvme."""
        return str(self.get(f"{ZERO}offload_{what}.device", "none"))


def dtype(name: Any) -> str:
    """DeepSpeed's several spellings of a type, as the short one; another name as it is."""
    spellings = {
        "fp16": ("fp16", "float16", "half", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "int8": ("int8", "torch.int8"),
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
        sentence: what a person reads.
        remedy: what to do instead.
        source: where this was read, file and function.
        when: whether it holds for these keys, in this situation.
        versions: the DeepSpeed versions that it holds for.
        knobs: the knobs whose values decide; for `refuse`, all that `when` reads.
        becomes: for `change`, the value that is really used for the first key.
        where: for keys that cannot be listed beforehand or need not be written, the broken keys in this situation.
        note: the numbers behind the sentence, for this situation and key.
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
    note: Callable[[Situation, str], str] | None = None

    def broken(self, situation: Situation) -> list[str]:
        """The keys for which the rule holds in this situation."""
        if self.where is not None:
            return list(self.where(situation))
        present = [key for key in self.keys if situation.has(key)]
        return present if present and self.when(situation) else []
