"""Claims: rows that say which worker has taken what, so that nobody else does the same.

A claim is made before the work starts and given back in the transaction that stores what came of it. It belongs to a
worker and an attempt: what a worker brings after its claim has gone to another is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from autotune.store.engine import now
from autotune.store.tables import claims, workers

PROBE, FINALS, MENDING = "probe", "finals", "mending"
"""What is claimed: a candidate to be probed, by its key; the finals of a sweep; bringing Optuna's study up to date."""


class ClaimLost(Exception):
    """A claim has gone to another worker, which took this one for dead; what was measured under it is not kept."""


class Refused(StrEnum):
    """Why there is no claim."""

    STALE = "stale"  # probes have been stored that the asker has not seen
    TAKEN = "taken"  # another worker has it
    FULL = "full"  # what the budget has left is in flight, or finals are being held
    DEADLY = "deadly"  # as many workers as may have died of it


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that a worker has taken.

    Attributes:
        study, what, key: what was taken (see PROBE).
        worker: the id of who has it.
        attempt: from 1 up; the workers before it died.
    """

    study: str
    what: str
    key: str
    worker: str
    attempt: int


def held(connection: Connection, claim: Claim) -> bool:
    """Whether the claim is still this worker's."""
    return connection.execute(select(claims.c.key).where(_is(claim))).first() is not None


def give_back(connection: Connection, claim: Claim) -> bool:
    """End a claim; False where it is no longer this worker's."""
    return connection.execute(delete(claims).where(_is(claim))).rowcount == 1


def standing(connection: Connection, study: str) -> list[tuple[Claim, str | None, bool]]:
    """Every claim in a study, with its sweep, and whether its worker is there: the others are orphans."""
    query = (
        select(claims, workers.c.id.label("there"))
        .join(workers, workers.c.id == claims.c.worker, isouter=True)
        .where(claims.c.study == study)
        .order_by(claims.c.claimed, claims.c.key)
    )
    rows = connection.execute(query).mappings()
    return [
        (
            Claim(study, row["what"], row["key"], row["worker"], row["attempt"]),
            row["sweep"],
            row["there"] is not None,
        )
        for row in rows
    ]


def take(
    connection: Connection,
    study: str,
    what: str,
    key: str,
    worker: str,
    sweep: str | None,
    among: list[tuple[Claim, str | None, bool]],
    attempts: int,
) -> Claim | Refused:
    """Take something, also from a worker that is gone. The study's row is locked.

    Args:
        connection: of the transaction.
        study: see Claim.
        what: see Claim.
        key: see Claim.
        worker: who takes it.
        sweep: for which sweep, by the name of its Optuna study.
        among: the standing claims.
        attempts: how many workers may try it.
    """
    for claim, _, there in among:
        if (claim.what, claim.key) != (what, key):
            continue
        if claim.worker == worker:
            return claim
        if there:
            return Refused.TAKEN
        if claim.attempt >= attempts:
            return Refused.DEADLY
        taken = Claim(study, what, key, worker, claim.attempt + 1)
        values = {"worker": worker, "attempt": taken.attempt, "sweep": sweep, "claimed": now(connection)}
        connection.execute(update(claims).where(_is(claim)).values(values))
        return taken
    values = {"worker": worker, "attempt": 1, "sweep": sweep, "claimed": now(connection)}
    connection.execute(insert(claims).values(study=study, what=what, key=key, **values))
    return Claim(study, what, key, worker, 1)


def _is(claim: Claim) -> ColumnElement[bool]:
    return (
        (claims.c.study == claim.study)
        & (claims.c.what == claim.what)
        & (claims.c.key == claim.key)
        & (claims.c.worker == claim.worker)
        & (claims.c.attempt == claim.attempt)
    )
