"""What cannot run is known before it is tried, and told in figures."""

from __future__ import annotations

from autotune.machine.machine import GIB, gib
from autotune.settings import compose_settings
from autotune.space.needs import impossibility, least_host_bytes
from autotune.space.space import Space

BILLION = 1_000_000_000


def test_a_model_that_is_too_large_is_told_with_the_least_that_it_needs_where_it_is_short() -> None:
    settings = compose_settings(["machine=cpu", "machine.host_memory_gib=64"])
    space = Space(settings)
    reason = impossibility(space.candidates, 20 * BILLION, {}, settings.workload, settings.machine)
    device, host = sorted({str(reason(candidate)) for candidate in space.candidates}, key=lambda text: "host" in text)
    needed = "parameters and optimizer states (20.00 billion parameters) need at least "
    assert device == f"{needed}18.63 GiB per device, and machine=cpu has 0.125 GiB"
    offloaded = [c for c in space.candidates if c.offload_param and c.offload_optimizer]
    least = min(least_host_bytes(c, 20 * BILLION, settings.workload, settings.machine) for c in offloaded)
    assert least > 200 * GIB
    assert host == f"{needed}{gib(least)} of host memory per node, and machine=cpu has 64.00 GiB"


def test_only_what_needs_too_much_is_ruled_out() -> None:
    settings = compose_settings(["machine=a100_80g", "machine.devices_per_node=8"])
    space = Space(settings)
    reason = impossibility(space.candidates, 20 * BILLION, {}, settings.workload, settings.machine)
    kept = [candidate for candidate in space.candidates if reason(candidate) is None]
    assert {(c.zero_stage, c.offload_optimizer) for c in kept if c.offload_param is None} == {
        (1, None),
        (1, "cpu"),
        (2, None),
        (2, "cpu"),
        (3, None),
        (3, "cpu"),
    }


def test_blocks_that_cannot_be_checkpointed_rule_out_what_does_so() -> None:
    settings = compose_settings(["machine=cpu"])
    space = Space(settings)
    why = {f"{share}/mlp": "a Block has no mlp" for share in ("quarter", "half", "all")}
    reason = impossibility(space.candidates, None, why, settings.workload, settings.machine)
    ruled_out = {candidate for candidate in space.candidates if reason(candidate)}
    assert ruled_out == {candidate for candidate in space.candidates if candidate.checkpoint_part == "mlp"}
    assert {reason(candidate) for candidate in ruled_out} == {"a Block has no mlp"}
