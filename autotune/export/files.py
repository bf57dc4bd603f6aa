"""Writing the files that are handed over: whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autotune.errors import SettingsError


def write_json(path: Path, values: Any) -> Path:
    """Write JSON that people read, replacing the file at once: a reader sees the old one or the new one.

    Raises:
        SettingsError: the folder cannot be made or written, or the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}", "output=… (tune) or --out … (export) names another folder"
        ) from error
    return path
