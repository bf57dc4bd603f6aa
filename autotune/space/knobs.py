"""The knobs: what each may be, where DeepSpeed's config has it, its default there; and how choices are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import SettingsError
from autotune.workload.workload import PRECISIONS

Value = bool | int | float | str | None

_MAX_CHOICES = 1000
_ZERO = "zero_optimization."


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing that can be turned.

    Attributes:
        name: as in the settings, on the Candidate and in SQL.
        kind: `int`, `float`, `bool` or `choice`.
        help: one sentence for people.
        choices: what a `choice` may be.
        low, high: the bounds of a number, both included.
        none: whether `null` (or `none`) is a value of its own, beside leaving the knob out.
        default: the value of a knob that is left out; None where the workload or the stage decides.
        key: dotted path in a DeepSpeed config; the knob's own name where DeepSpeed's config has no key for it.
    """

    name: str
    kind: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    none: bool = False
    default: Value = None
    key: str = ""

    @property
    def allowed(self) -> str:
        """What the knob may be, in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(
                (*(("none",) if self.none and "none" not in self.choices else ()), *self.choices)
            )
        if self.kind == "bool":
            return "true or false"
        number = "a whole number" if self.kind == "int" else "a number"
        if self.low is not None and self.high is not None:
            bounds = f" from {self.low:g} to {self.high:g}"
        else:
            bounds = f" of at least {self.low:g}" if self.low is not None else ""
        return number + bounds + (", or null for off" if self.none else "")


# In the order in which they are bound: what decides whether a knob has an effect comes before it, micro_batch last.
KNOBS: tuple[Knob, ...] = (
    Knob(
        "precision", "choice", "What the model computes in; left out, workload.precision decides.",
        choices=PRECISIONS, key="precision",
    ),
    Knob(
        "zero_stage", "int", "What ZeRO partitions: nothing, optimizer states, gradients too, parameters too.",
        low=0, high=3, default=0, key=_ZERO + "stage",
    ),
    Knob(
        "offload_optimizer", "choice", "Where optimizer states live and the update runs, if not on the device.",
        choices=("cpu", "nvme"), none=True, key=_ZERO + "offload_optimizer.device",
    ),
    Knob(
        "offload_param", "choice", "Where stage 3 keeps parameter partitions, if not on the device.",
        choices=("cpu", "nvme"), none=True, key=_ZERO + "offload_param.device",
    ),
    Knob(
        "checkpoint_blocks", "choice", "How many of the model's blocks recompute their activations in backward.",
        choices=("none", "quarter", "half", "all"), none=True, default="none", key="checkpoint_blocks",
    ),
    Knob(
        "checkpoint_part", "choice", "What of such a block is recomputed.",
        choices=("whole", "attention", "mlp"), default="whole", key="checkpoint_part",
    ),
    Knob(
        "checkpoint_input", "choice", "Where the saved input of such a block waits.",
        choices=("device", "cpu"), default="device", key="checkpoint_input",
    ),
    Knob(
        "overlap_comm", "bool", "Reduce gradients while backward still runs; left out, only at stage 3.",
        key=_ZERO + "overlap_comm",
    ),
    Knob(
        "reduce_bucket_size", "int", "Elements of gradient reduced at a time; the buffer is allocated in full.",
        low=1, default=500_000_000, key=_ZERO + "reduce_bucket_size",
    ),
    Knob(
        "allgather_bucket_size", "int", "Elements of updated parameters gathered at a time at stages 1 and 2.",
        low=2, default=500_000_000, key=_ZERO + "allgather_bucket_size",
    ),
    Knob(
        "stage3_prefetch_bucket_size", "int", "Elements of parameters that stage 3 fetches ahead of their use.",
        low=0, default=50_000_000, key=_ZERO + "stage3_prefetch_bucket_size",
    ),
    Knob(
        "stage3_param_persistence_threshold", "int", "Parameters below this many elements stay whole on every device.",
        low=0, default=100_000, key=_ZERO + "stage3_param_persistence_threshold",
    ),
    Knob(
        "stage3_max_live_parameters", "int", "Elements of whole parameters that a device holds before it lets go.",
        low=0, default=1_000_000_000, key=_ZERO + "stage3_max_live_parameters",
    ),
    Knob(
        "stage3_max_reuse_distance", "int", "A parameter used again within this many elements is kept.",
        low=0, default=1_000_000_000, key=_ZERO + "stage3_max_reuse_distance",
    ),
    Knob(
        "zero_hpz_partition_size", "int", "Devices over which a second copy of the parameters is partitioned (hpZ).",
        low=1, default=1, key=_ZERO + "zero_hpz_partition_size",
    ),
    Knob(
        "expandable_segments", "bool", "Let the CUDA allocator grow its segments instead of adding new ones.",
        default=False, key="expandable_segments",
    ),
    Knob(
        "garbage_collection_threshold", "float", "Share of a set memory fraction above which idle blocks are freed.",
        low=0.01, high=0.99, none=True, key="garbage_collection_threshold",
    ),
    Knob(
        "accumulation", "int", "Micro-steps per optimizer step; derived where the workload fixes the global batch.",
        low=1, key="gradient_accumulation_steps",
    ),
    Knob(
        "micro_batch", "int", "Sequences per device and micro-step.",
        low=1, default=1, key="train_micro_batch_size_per_gpu",
    ),
)  # fmt: skip

BY_NAME: dict[str, Knob] = {knob.name: knob for knob in KNOBS}


def choices(knob: Knob, setting: Any) -> list[Value]:
    """The values that a setting lists: a scalar one, a list its items, a mapping `{low, high, step|log}` a range.

    Raises:
        SettingsError: naming `space.<knob>` and what it may be.
    """
    if isinstance(setting, Mapping):
        return list(_range(knob, setting))
    if isinstance(setting, list | tuple):
        if not setting:
            raise _error(knob, "is an empty list")
        values = [_value(knob, item) for item in setting]
        for position, value in enumerate(values):
            if any(value == earlier and type(value) is type(earlier) for earlier in values[:position]):
                raise _error(knob, f"lists {_shown(value)} twice")
        return values
    return [_value(knob, setting)]


def _value(knob: Knob, value: Any) -> Value:
    """One value, checked and in the knob's type."""
    if value is None or (isinstance(value, str) and value.lower() == "none" and knob.none):
        if not knob.none:
            raise _error(knob, "cannot be null inside a list")
        return "none" if "none" in knob.choices else None
    good = value
    if knob.kind == "int" and isinstance(value, float) and value.is_integer():
        good = int(value)
    if knob.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        good = float(value)
    kinds: dict[str, type] = {"int": int, "float": float, "bool": bool, "choice": str}
    if type(good) is not kinds[knob.kind]:
        raise _error(knob, f"cannot be {_shown(value)}")
    if knob.kind == "choice" and good not in knob.choices:
        raise _error(knob, f"cannot be {_shown(value)}")
    assert isinstance(good, bool | int | float | str)
    if not isinstance(good, str) and not _within(knob, good):
        raise _error(knob, f"cannot be {_shown(value)}")
    return good


def _within(knob: Knob, number: float) -> bool:
    return (knob.low is None or number >= knob.low) and (knob.high is None or number <= knob.high)


def _range(knob: Knob, mapping: Mapping[Any, Any]) -> list[Value]:
    """A range as its grid: powers of two with `log`, else steps, from `low` to `high`, both included."""
    if knob.kind not in ("int", "float"):
        raise _error(knob, "cannot be a range")
    unknown = sorted(str(name) for name in mapping if name not in ("low", "high", "step", "log"))
    if unknown:
        raise _error(knob, f"has a range with {', '.join(unknown)}")
    if "low" not in mapping or "high" not in mapping:
        raise _error(knob, "has a range without both low and high")
    low, high = _value(knob, mapping["low"]), _value(knob, mapping["high"])
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    log, step = mapping.get("log", False), mapping.get("step")
    if not isinstance(log, bool):
        raise _error(knob, f"has a range with log={_shown(log)}")
    if log == (step is not None):
        raise _error(knob, "has a range with both step and log" if log else "has a range with neither step nor log")
    if low > high:
        raise _error(knob, f"has a range from {low} to {high}")
    return _powers(knob, low, high) if log else _steps(knob, low, high, step)


def _powers(knob: Knob, low: float, high: float) -> list[Value]:
    if knob.kind != "int" or low < 1:
        raise _error(knob, "has a log range, which is for whole numbers from 1")
    powers: list[Value] = [1 << bits for bits in range(int(high).bit_length()) if low <= 1 << bits <= high]
    if not powers:
        raise _error(knob, f"has a log range without a power of two between {low} and {high}")
    return powers


def _steps(knob: Knob, low: float, high: float, step: Any) -> list[Value]:
    whole = isinstance(step, float) and step.is_integer()
    if (
        isinstance(step, bool)
        or not isinstance(step, int | float)
        or (knob.kind == "int" and isinstance(step, float) and not whole)
    ):
        raise _error(knob, f"has a range with step={_shown(step)}")
    if step <= 0:
        raise _error(knob, f"has a range with step={_shown(step)}")
    count = int((high - low) / step + 1e-9) + 1
    if count > _MAX_CHOICES:
        raise _error(knob, f"has a range of {count} values (at most {_MAX_CHOICES})")
    if knob.kind == "int":
        return [int(low) + index * int(step) for index in range(count)]
    return [round(low + index * step, 10) for index in range(count)]


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | bool | type(None)) else str(value)


def _error(knob: Knob, what: str) -> SettingsError:
    ranges = (
        "; a range is {low: 1, high: 64, log: true} (powers of two) or has a step"
        if knob.kind in ("int", "float")
        else ""
    )
    return SettingsError(
        f"space.{knob.name} {what}: it may be {knob.allowed}",
        f"write one value (space.{knob.name}=…) to fix it or a list (space.{knob.name}=[…,…]) to choose from{ranges}",
    )


def listed(settings: Any, devices_per_node: int) -> dict[str, list[Value]]:
    """The values that the space settings list, by knob; a knob that is left out is absent.

    Raises:
        SettingsError: a value cannot mean anything.
    """
    return {
        knob.name: choices(knob, _resolved(knob, setting, devices_per_node))
        for knob in KNOBS
        if (setting := getattr(settings, knob.name)) is not None
    }


def _resolved(knob: Knob, setting: Any, devices_per_node: int) -> Any:
    """The setting with the word `node` as the number of devices that a node has."""
    if knob.name != "zero_hpz_partition_size":
        return setting
    if isinstance(setting, list):
        numbers = [devices_per_node if item == "node" else item for item in setting]
        return list(dict.fromkeys(numbers)) if "node" in setting else numbers
    return devices_per_node if setting == "node" else setting
