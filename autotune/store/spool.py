"""Measurements that the database could not take: JSON lines in the study's folder, taken in by the next start."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import StoreError
from autotune.store.claims import Claim, ClaimLost

if TYPE_CHECKING:
    from autotune.store.store import Store


def keep(folder: Path, row: dict[str, Any], claim: Claim | None, study: Mapping[str, str]) -> Path:
    """Write a probe's row to a file of its own, on disk when this returns.

    Args:
        folder: of the study.
        row: of the probe.
        claim: under which it was measured.
        study: digests of its workload and its machine, which the study that takes it in must have.

    Raises:
        StoreError: the file cannot be written either.
    """
    path = folder / f"spool-{row['uid']}.jsonl"
    part = path.with_suffix(".part")
    line = json.dumps({"row": row, "claim": dataclasses.asdict(claim) if claim else None, "of": dict(study)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise StoreError(
            f"a measurement could be kept neither in the store nor in {path}: {error.strerror or error}",
            "make room there, or name another folder with output=…; the same command measures it again",
        ) from error
    return path


def take_in(folder: Path, store: Store, study: Mapping[str, str]) -> int:
    """Put what earlier runs kept in a study's folder into the store, each once, and remove the files.

    A file is removed after its rows are committed, and rows that are there already are known by their uid: it does no
    harm to be killed in between, or to do this twice at the same time.

    Args:
        folder: of the study.
        store: takes them.
        study: digests of its workload and machine; a file of another study of that name is left where it is.

    Returns:
        How many measurements were taken in. One whose candidate another worker took over is not.
    """
    taken = 0
    for path in sorted(folder.glob("spool-*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:  # another worker was quicker
            continue
        of_this = [spooled for line in lines if (spooled := json.loads(line))["of"] == dict(study)]
        if len(of_this) < len(lines):
            continue
        for spooled in of_this:
            claim = Claim(**spooled["claim"]) if spooled["claim"] else None
            try:
                store.add_row(spooled["row"], claim)
            except ClaimLost:
                if claim is None or store.is_superseded(spooled["row"], claim):
                    continue
                store.add_row(spooled["row"])
            taken += 1
        path.unlink(missing_ok=True)
    return taken
