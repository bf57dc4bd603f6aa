"""Predictions against a GPU's own counters: `make gpu-check`, or `python -m tests.gpu [REPORT.json]`, where CUDA is."""

from __future__ import annotations

import sys

from tests.gpu.check import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
