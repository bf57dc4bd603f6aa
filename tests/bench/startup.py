"""How long `python -m autotune --help` takes, beside a Python that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time

from autotune.probe.spread import median_spread

RUNS = 11


def main() -> None:
    """Print both medians with their spreads."""
    commands = {"python -c pass": ["-c", "pass"], "python -m autotune --help": ["-m", "autotune", "--help"]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, arguments in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        median, low, high = median_spread(values)
        print(f"{name:<28}{median:.3f} s ({low:.3f}–{high:.3f}), {RUNS} runs in turn")
