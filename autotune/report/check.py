"""What `check` prints: every rule that a DeepSpeed config breaks, with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from autotune.machine.machine import Machine
from autotune.space.check import Finding

COLUMNS = ("kind", "rule", "where", "sentence", "remedy", "source")
_HEADINGS = {"ignore": "ignored, without a word", "change": "changed, without a word", "refuse": "refused"}


def finding_rows(found: Sequence[Finding]) -> list[dict[str, str]]:
    """Findings as JSON and CSV have them."""
    return [
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


def print_findings(found: Sequence[Finding], path: str, machine: Machine, out: TextIO) -> None:
    """Print findings for people, the silent ones first as they come.

    Args:
        found: of space.check.findings.
        path: of the config.
        machine: against which it was checked.
        out: stdout.
    """
    shape = f"{machine.name}, {machine.nodes} × {machine.devices_per_node} devices"
    lines = [f"{path} on {shape}: {f'{len(found)} rules broken' if found else 'nothing to object to'}"]
    heading = ""
    for finding in found:
        if finding.rule.kind.value != heading:
            heading = finding.rule.kind.value
            lines += ["", _HEADINGS[heading]]
        lines += [
            f"  {finding.where}  [{finding.rule.id}]",
            f"      {finding.sentence}",
            f"      → {finding.remedy}",
        ]
    out.write("\n".join(lines) + "\n")
