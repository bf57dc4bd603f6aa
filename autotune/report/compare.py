"""Studies side by side: winners, throughput per device, memory, what differs, and whether the difference is real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from autotune.errors import SettingsError
from autotune.probe.measurement import PLANNED, VIRTUAL
from autotune.report.output import print_csv, print_json, print_table
from autotune.report.ratio import Ratio, throughput_ratio
from autotune.report.units import NOTHING, gib, marked, seconds, spread, tokens
from autotune.store.records import ProbeRecord, StudyRecord, winner_of
from autotune.store.store import Store


@dataclass(frozen=True, slots=True)
class Entry:
    """One study and its winner, where it has one."""

    study: StudyRecord
    winner: ProbeRecord | None

    @property
    def rate(self) -> float | None:
        """Tokens per second and device, the median."""
        measured = self.winner.measurement if self.winner else None
        if measured is None or measured.tokens_per_s is None:
            return None
        return measured.tokens_per_s / self.study.machine.world_size

    @property
    def ends(self) -> tuple[float, float] | None:
        """The ends of that median's spread."""
        measured = self.winner.measurement if self.winner else None
        if measured is None or measured.tokens_per_s_low is None or measured.tokens_per_s_high is None:
            return None
        world = self.study.machine.world_size
        return measured.tokens_per_s_low / world, measured.tokens_per_s_high / world

    def row(self) -> dict[str, Any]:
        """The study as JSON has it."""
        machine = self.study.machine
        ends = self.ends
        measured = self.winner.measurement if self.winner else None
        used = measured.used_bytes if measured else None
        return {
            "study": self.study.name,
            "model": self.study.workload.model.name,
            "machine": machine.name,
            "world_size": machine.world_size,
            "winner_trial": self.winner.trial if self.winner else None,
            "key": self.winner.key if self.winner else None,
            "candidate": self.winner.candidate.to_dict() if self.winner else None,
            "probe_kind": measured.probe_kind if measured else None,
            "tokens_per_s": measured.tokens_per_s if measured else None,
            "tokens_per_s_per_device": self.rate,
            "tokens_per_s_per_device_low": ends[0] if ends else None,
            "tokens_per_s_per_device_high": ends[1] if ends else None,
            "step_s": measured.step_s if measured else None,
            "used_bytes": used,
            "device_memory_bytes": machine.device_memory_bytes,
            "used_share": used / machine.device_memory_bytes if used is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a study compares with the first one, by throughput per device.

    Attributes:
        ratio: its throughput per device over the first one's; None where there is nothing to compare.
        sentence: what people read.
    """

    study: str
    base: str
    ratio: Ratio | None
    sentence: str

    def row(self) -> dict[str, Any]:
        """The verdict as JSON has it; `significant` says that the spreads do not overlap."""
        return {
            "study": self.study,
            "base": self.base,
            "ratio": self.ratio.value if self.ratio else None,
            "ratio_low": self.ratio.low if self.ratio else None,
            "ratio_high": self.ratio.high if self.ratio else None,
            "significant": self.ratio.significant if self.ratio else None,
            "sentence": self.sentence,
        }


def compare_studies(store: Store, names: list[str], form: str, out: TextIO) -> None:
    """Print two or more studies beside each other, each compared with the first.

    Args:
        store: open, for reading.
        names: of the studies.
        form: table, json or csv.
        out: stdout.

    Raises:
        SettingsError: fewer than two studies are named, or one of them does not exist.
    """
    if len(names) < 2:
        raise SettingsError("compare takes two studies or more", "`autotune studies` lists those that there are")
    entries = []
    for name in names:
        study = store.study(name)
        entries.append(Entry(study, winner_of(study, store.probes(name))))
    verdicts = [compare_two(entries[0], entry) for entry in entries[1:]]
    found = differences(entries)
    if form == "json":
        rows = [entry.row() for entry in entries]
        print_json(out, {"studies": rows, "differences": found, "comparisons": [verdict.row() for verdict in verdicts]})
    elif form == "csv":
        _print_csv(out, entries, verdicts, found)
    else:
        _print_tables(out, entries, verdicts, found)


def compare_two(base: Entry, other: Entry) -> Verdict:
    """One study against another, by throughput per device.

    Where both spreads overlap, no difference is claimed: that is a verdict too.
    """
    names = (other.study.name, base.study.name)
    ratio = None
    if other.winner and base.winner:
        measured = (other.winner.measurement, base.winner.measurement)
        ratio = throughput_ratio(*measured, other.study.machine.world_size, base.study.machine.world_size)
    if ratio is None:
        lacking = other if other.rate is None else base
        why = "has no winner yet" if lacking.winner is None else "has a winner without a throughput"
        return Verdict(*names, None, f"{names[0]} and {names[1]}: {lacking.study.name} {why}")
    faster = "faster" if ratio.value > 1 else "slower"
    if ratio.significant is None:
        sentence = f"{names[0]} seems {faster} than {names[1]} per device: {ratio}"
    elif ratio.significant:
        sentence = f"{names[0]} is {faster} than {names[1]} per device: {ratio}"
    else:
        sentence = f"no significant difference between {names[0]} and {names[1]} per device: {ratio}"
    if base.study.workload.digest != other.study.workload.digest:
        sentence += "; they train different workloads"
    kinds = {entry.winner.measurement.probe_kind for entry in (base, other) if entry.winner}
    if len(kinds) > 1:
        sentence += f"; one is measured, the other not ({' and '.join(sorted(kinds))})"
    elif kinds == {VIRTUAL}:
        sentence += f"; both are {PLANNED}"
    return Verdict(*names, ratio, sentence)


def differences(entries: list[Entry]) -> dict[str, dict[str, list[Any]]]:
    """What differs: section → dotted name → the value of every study, in order; None where a study has no such name.

    A study without a winner makes no difference to the candidates.
    """
    sections: dict[str, Sequence[Mapping[str, Any] | None]] = {
        "candidate": [entry.winner.candidate.to_dict() if entry.winner else None for entry in entries],
        "machine": [entry.study.machine.to_dict() for entry in entries],
        "workload": [entry.study.workload.to_dict() for entry in entries],
    }
    return {section: _differing(sides) for section, sides in sections.items()}


def _differing(sides: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    flat = [None if side is None else _flat(side) for side in sides]
    known = [side for side in flat if side is not None]
    names = dict.fromkeys(name for side in known for name in side)
    differing = [name for name in names if any(side.get(name) != known[0].get(name) for side in known)]
    return {name: [side.get(name) if side else None for side in flat] for name in differing}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _print_csv(
    out: TextIO, entries: list[Entry], verdicts: list[Verdict], found: dict[str, dict[str, list[Any]]]
) -> None:
    differing = {f"{section}.{name}": values for section, names in found.items() for name, values in names.items()}
    compared = ["ratio", "ratio_low", "ratio_high", "significant", "verdict"]
    rows = []
    for index, entry in enumerate(entries):
        row = entry.row() | {name: values[index] for name, values in differing.items()}
        if index:
            verdict = verdicts[index - 1].row()
            row |= {name: verdict[name] for name in compared[:-1]} | {"verdict": verdict["sentence"]}
        rows.append(row)
    print_csv(out, [*entries[0].row(), *compared, *differing], rows)


def _print_tables(
    out: TextIO, entries: list[Entry], verdicts: list[Verdict], found: dict[str, dict[str, list[Any]]]
) -> None:
    headings = ["study", "trial", "winner", "tokens/s/device", "spread", "step", "memory", "of"]
    print_table(out, headings, [_cells(entry) for entry in entries])
    for section, names in found.items():
        if names:
            title = {"candidate": "what differs in the winners"}.get(section, f"what differs in the {section}s")
            rows = [[name, *(_shown(value) for value in values)] for name, values in names.items()]
            print_table(out, ["", *(entry.study.name for entry in entries)], rows, title=title)
    for verdict in verdicts:
        out.write(f"{verdict.sentence}\n")


def _cells(entry: Entry) -> list[str]:
    row = entry.row()
    return [
        row["study"],
        NOTHING if entry.winner is None else str(entry.winner.trial),
        "no winner yet" if entry.winner is None else marked(str(entry.winner.candidate), row["probe_kind"]),
        tokens(entry.rate),
        spread(*(entry.ends or (None, None))),
        seconds(row["step_s"]),
        gib(row["used_bytes"]),
        gib(row["device_memory_bytes"]),
    ]


def _shown(value: Any) -> str:
    return NOTHING if value is None or value == "" else str(value)
