"""What `check` prints: every rule that a DeepSpeed config breaks, with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from autotune.machine.machine import Machine
from autotune.report.output import print_csv, print_json
from autotune.space.check import Finding

_HEADINGS = {"ignore": "ignored, without a word", "change": "changed, without a word", "refuse": "refused"}
_COLUMNS = ("kind", "rule", "where", "sentence", "remedy", "source")


def print_findings(found: Sequence[Finding], path: str, machine: Machine, form: str, out: TextIO) -> None:
    """Print findings, the silent ones first as they come.

    Args:
        found: of space.check.findings.
        path: of the config, for people.
        machine: against which it was checked.
        form: table, json or csv.
        out: stdout.
    """
    rows = [
        {
            "kind": finding.rule.kind.value,
            "rule": finding.rule.id,
            "where": finding.where,
            "sentence": finding.sentence,
            "remedy": finding.remedy,
            "source": finding.rule.source,
        }
        for finding in found
    ]
    if form == "json":
        print_json(out, rows)
    elif form == "csv":
        print_csv(out, _COLUMNS, rows)
    else:
        shape = f"{machine.name}, {machine.nodes} × {machine.devices_per_node} devices"
        lines = [f"{path} on {shape}: {len(rows)} rules broken" if rows else f"{path} on {shape}: nothing to object to"]
        heading = ""
        for row in rows:
            if row["kind"] != heading:
                heading = row["kind"]
                lines += ["", _HEADINGS[heading]]
            lines += [f"  {row['where']}  [{row['rule']}]", f"      {row['sentence']}", f"      → {row['remedy']}"]
        out.write("\n".join(lines) + "\n")
