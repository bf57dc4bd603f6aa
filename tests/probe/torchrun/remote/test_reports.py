"""Of what several nodes report, the first that failed says why: what the others saw is its consequence."""

from __future__ import annotations

from typing import Any

from autotune.probe.torchrun.remote.launcher import Loss, merged


def end(ended: bool = False, **said: Any) -> dict[str, Any]:
    """A node's last frame."""
    host = {"peak_bytes": 7, "full": None}
    quiet = {"exit_codes": {}, "error": None, "timed_out": False, "stopped": [], "vanished": None, "hosts": [host]}
    return {"report": quiet | said, "stopped": ended}


def test_all_went_well() -> None:
    report = merged({1: end(), 0: end()}, 2, None)
    assert (report["exit_codes"], report["error"], report["timed_out"], report["vanished"]) == ({}, None, False, None)
    assert [host["peak_bytes"] for host in report["hosts"]] == [7, 7]


def test_the_first_failure_counts_and_not_the_ranks_that_were_ended_for_it() -> None:
    first = end(exit_codes={3: -9})
    assert merged({1: first, 0: end(exit_codes={0: -6})}, 2, None)["exit_codes"] == {3: -9}
    assert merged({1: first, 0: end(ended=True, exit_codes={0: -9})}, 2, None)["exit_codes"] == {3: -9}


def test_the_deadline_of_one_node_is_that_of_all() -> None:
    report = merged({0: end(timed_out=True, stopped=[1]), 1: end(ended=True)}, 2, None)
    assert (report["timed_out"], report["stopped"]) == (True, [1])


def test_a_node_without_a_last_word_is_told_by_its_loss() -> None:
    report = merged({0: end()}, 2, Loss("host b was lost"))
    assert (report["error"], report["timed_out"]) == ("host b was lost", False)
    assert [host["peak_bytes"] for host in report["hosts"]] == [7, 0]
    assert merged({}, 2, Loss("Slurm's time limit", timed_out=True))["timed_out"]
