"""The figures that the project claims, measured here and now: `make bench`, or `python -m tests.bench [NAME …]`.

Each is a ratio, or medians with their spreads, from pairs run in turn on one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.bench import accuracy, faults, gain, overhead, planning, soak, startup

BENCHES: dict[str, Callable[[], None]] = {
    "startup": startup.main,
    "overhead": overhead.main,
    "gain": gain.main,
    "accuracy": accuracy.main,
    "planning": planning.main,
}
LONG: dict[str, Callable[[], None]] = {"faults": faults.main, "soak": soak.main}
"""Those that have a target of their own and prove no figure."""

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHES:
        print(f"\n== {name}", flush=True)
        (BENCHES | LONG)[name]()
