"""A prediction for people: whether it fits, memory per phase, and what holds it at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from autotune.machine.machine import GIB, Machine
from autotune.probe.virtual.prediction import Verdict
from autotune.report.output import print_table
from autotune.report.units import NOTHING, gib, percent, seconds

ESTIMATE = "roofline estimate"
PROMISE = "it ranks candidates, and promises nothing"
HOLDERS = 24
"""Rows of the breakdown; what is smaller comes together in one more."""


def print_prediction(out: TextIO, prediction: Mapping[str, Any], machine: Machine) -> None:
    """Print a prediction.

    Args:
        out: stdout.
        prediction: as Prediction.to_dict() has it.
        machine: for which it was made.
    """
    out.write("\n".join(_verdict(prediction, machine)) + "\n\n")
    print_phases(out, prediction)
    _print_holders(out, prediction)


def print_phases(out: TextIO, prediction: Mapping[str, Any]) -> None:
    """Print memory by phase, of the worst rank."""
    columns = ["phase", "allocated", "reserved", "device total", "host", "of it pinned"]
    names = ("allocated", "reserved", "device_total", "host", "pinned")
    rows = [
        [phase.replace("_", " "), *(gib(memory[name]) for name in names)]
        for phase, memory in prediction["phases"].items()
    ]
    print_table(out, columns, rows, title=f"predicted memory of rank {prediction['rank']}, the worst of each phase")


def _verdict(prediction: Mapping[str, Any], machine: Machine) -> list[str]:
    used, has = prediction["device_total"], machine.device_memory_bytes
    host, node = prediction["host_per_node"], int(machine.host_memory_gib * GIB)
    verdict = Verdict.DOES_NOT_FIT if prediction["host_oom"] else prediction["verdict"]
    lines = [
        f"predicted  {verdict}: {gib(used)} of {gib(has)} per device ({percent(used / has)}; "
        f"{gib(machine.usable_bytes)} leave the headroom of {percent(machine.headroom)})"
    ]
    if oom := prediction["oom"]:
        where = f"{oom['phase']}, {oom['module']}" if oom["module"] else oom["phase"]
        lines.append(
            f"{'':<11}out of memory in {where}: {gib(oom['requested_bytes'])} asked for with "
            f"{gib(oom['allocated_bytes'])} allocated, {gib(oom['reserved_bytes'])} reserved"
        )
    lines.append(f"{'':<11}host {gib(host)} of {gib(node)} per node" + ": too much" * prediction["host_oom"])
    if prediction["retries"]:
        lines.append(f"{'':<11}the allocator gives its cache back {prediction['retries']} times, which is slow")
    if prediction["step_s"]:
        lines.append(f"{'':<11}step {seconds(prediction['step_s'])} ({ESTIMATE}: {PROMISE})")
    return lines


def _print_holders(out: TextIO, prediction: Mapping[str, Any]) -> None:
    holders = prediction["holders"]
    if not holders:  # an emulated device that is too small for its first tensor
        return
    total = sum(holder["bytes"] for holder in holders)
    shown = [(h["kind"], h["name"] or NOTHING, h["bytes"], f"{h['count']:,}") for h in holders[:HOLDERS]]
    if rest := holders[HOLDERS:]:
        size, count = (sum(holder[name] for holder in rest) for name in ("bytes", "count"))
        shown.append((f"{len(rest)} smaller", NOTHING, size, f"{count:,}"))
    when = "when it runs out of memory" if prediction["oom"] else "at the peak of a steady step"
    rows = [[kind, gib(size), percent(size / total), count, name] for kind, name, size, count in shown]
    columns = ["held by", "memory", "share", "blocks", "module"]
    print_table(out, columns, rows, title=f"what holds it {when}")
