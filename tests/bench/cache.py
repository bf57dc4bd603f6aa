"""An empty cache for tapes and predictions, so that what is timed is timed cold."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "XDG_CACHE_HOME"


@contextmanager
def empty_cache() -> Iterator[Path]:
    """While entered, probers that are made keep their tapes and predictions in this folder; it is gone afterwards."""
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as folder:
        os.environ[VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
