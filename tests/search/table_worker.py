"""A worker over the formula of conftest.py, as a process: `table_worker.py URL OUTPUT SECONDS [NAME=VALUE …]`."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import AutotuneError
from autotune.probe.measurement import Measurement
from autotune.search.observer import Observer
from autotune.store.records import ProbeRecord
from autotune.store.store import Store

SPACE: dict[str, Any] = {
    "zero_stage": [1, 2, 3],
    "micro_batch": [1, 2, 4, 8, 16],
    "offload_optimizer": [None, "cpu"],
    "offload_param": None,
    "checkpoint_blocks": ["none", "all"],
    "checkpoint_part": "whole",
    "checkpoint_input": "device",
}
"""Sixty candidates."""


def formula() -> Any:
    spec = importlib.util.spec_from_file_location("formula", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["formula"] = module
    spec.loader.exec_module(module)
    return module


def settings(probes: int = 60, search: str = "auto", output: str = "studies", **study: float) -> Any:
    made = formula().make_settings(probes=probes, search=search, **SPACE)
    made.probe.stop_losers = False
    made.output = output
    made.study.reconnect_s = study.get("reconnect_s", 60.0)
    made.study.heartbeat_s = study.get("heartbeat_s", 5.0)
    return made


class Aloud(Observer):
    """Says on stderr what the search says."""

    def probing(self, candidate: Candidate, number: int, left: int) -> None:
        print("probing", candidate.key, file=sys.stderr, flush=True)

    def elsewhere(self, record: ProbeRecord) -> None:
        print("elsewhere", record.worker, file=sys.stderr, flush=True)

    def waiting(self, sentence: str) -> None:
        print("waiting", sentence, file=sys.stderr, flush=True)

    def confirming(self, candidate: Candidate, number: int, of: int) -> None:
        print("confirming", candidate.key, file=sys.stderr, flush=True)


def main() -> int:
    url, output, seconds, *more = sys.argv[1:]
    options: dict[str, Any] = {name: json.loads(value) for name, _, value in (word.partition("=") for word in more)}
    mine = settings(output=output, **options)

    def table(candidate: Candidate) -> Measurement:
        time.sleep(float(seconds))
        measured: Measurement = sys.modules["formula"].measure(candidate)
        return measured

    store = Store.open(url)
    store.patience.seconds = mine.study.reconnect_s
    store.crew(mine.study_name, heartbeat_s=mine.study.heartbeat_s)
    sweeper = sys.modules["formula"].Sweeper(store, table)
    try:
        result = sweeper.run(mine, observer=Aloud())
    except AutotuneError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    finally:
        store.close()
    print(json.dumps({"winner": result.winner.trial, "probed": result.counts.probed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
