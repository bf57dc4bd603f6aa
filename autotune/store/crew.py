"""The workers of a study as one of them sees them: who is there, who has claimed what, who has died."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from autotune.errors import InfraError, StoreError
from autotune.store.claims import FINALS, MENDING, PROBE, Claim, Refused, give_back, standing, take
from autotune.store.database import Database
from autotune.store.engine import CONNECT_TIMEOUT_S, now
from autotune.store.patience import Patience, patient
from autotune.store.tables import claims, probes, workers
from autotune.store.worker import Worker

STALE_BEATS = 6
"""A worker that cannot be looked at counts as dead after it has missed so many heartbeats."""

FILE_BEAT_S = 60.0
"""The heartbeat in a SQLite file. It is read only where two hosts share the file, and a write costs more there."""

PROBE_ATTEMPTS, FINALS_ATTEMPTS, MENDING_ATTEMPTS = 2, 3, 1_000_000
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class View:
    """What a worker needs to know of the others before it takes something.

    Attributes:
        taken: keys of the candidates that others are probing.
        in_flight: how many of them for this sweep.
        orphans: claims on candidates whose workers are gone.
        neighbours: other workers on this machine.
        buried: workers that were found dead just now, as `host:pid`.
    """

    taken: frozenset[str]
    in_flight: int
    orphans: tuple[Claim, ...]
    neighbours: int
    buried: tuple[str, ...]


NOBODY = View(frozenset(), 0, (), 0, buried=())


class Crew:
    """The workers of one study.

    Args:
        store: where they are written down.
        study: its name.
        family: what the workers of one command have in common; None for a command with one.
        heartbeat_s: how often a worker says that it is there.
    """

    def __init__(self, store: Database, study: str, family: str | None, heartbeat_s: float) -> None:
        self._store, self._study, self._family = store, study, family or uuid.uuid4().hex
        self._alone = store.is_file
        self._beat_s = FILE_BEAT_S if self._alone else heartbeat_s
        self._former: list[str] = []  # whom this process was before; leaving may not have reached the store
        self._sweep: str | None = None
        self._kind = ""
        self._searching = False
        self._steady_since = self._last_beat = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.me = Worker.here(self._family)

    @property
    def patience(self) -> Patience:
        """The store's."""
        return self._store.patience

    # coming and going

    def join(self) -> None:
        """Be one of the study's workers until `leave`; joining twice does nothing more.

        Raises:
            StoreError: the store is a file, and another command tunes the study.
        """
        if self._thread is None:
            self._enter()
            self._stop.clear()
            self._thread = threading.Thread(target=self._beating, name="heartbeat", daemon=True)
            self._thread.start()

    def begin(self, sweep: str, kind: str) -> None:
        """Say which sweep this worker searches for; `kind` keeps plans and measurements apart."""
        self._sweep, self._kind = sweep, kind
        self._say(searching=True)

    def end_search(self) -> None:
        """Say that this worker will claim no more candidates."""
        self._say(searching=False)

    def leave(self) -> None:
        """Give back every claim and go. Where the store cannot be reached, others will find this process gone."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=2 * CONNECT_TIMEOUT_S)  # a beat under way ends, or its connection would be left open
        self._thread = None
        self._former.append(self.me.id)
        with contextlib.suppress(StoreError), self._store.writing() as connection:
            connection.execute(delete(claims).where(claims.c.worker.in_(self._former)))
            connection.execute(delete(workers).where(workers.c.id.in_(self._former)))
        self.me = Worker.here(self._family)  # who comes again is another: the first one's trials are nobody's

    @patient
    def _enter(self) -> None:
        with self._store.writing() as connection:
            self._store.lock_study(connection, self._study)
            connection.execute(delete(workers).where(workers.c.id.in_(self._former)))
            connection.execute(delete(claims).where(claims.c.worker.in_(self._former)))
            if self._alone:
                self._refuse_second(connection)
            self._write(connection)

    def _refuse_second(self, connection: Connection) -> None:
        for row in self._others(connection):
            other = Worker.of(row)
            if other.family == self.me.family:
                continue
            if not self._is_dead(row, row["now"], certain=True):
                hint = "wait for it, end it, or start another study with study.name=…"
                if other.is_seen() is None:
                    minutes = max(1, round((row["heartbeat"] + self._stale_s - row["now"]) / 60))
                    hint += f"; if that process is gone, the study is free in {minutes} min"
                raise StoreError(
                    f"study {self._study} is being tuned by process {other.pid} on {other.host}",
                    f"{hint}. Several commands work on one study in PostgreSQL: study.store=postgresql://…",
                )
            connection.execute(delete(workers).where(workers.c.id == other.id))

    @patient
    def _say(self, *, searching: bool) -> None:
        self._searching = searching
        with self._store.writing() as connection:
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        """Write this worker's row, which others may have deleted in the belief that it is dead."""
        moment = now(connection)
        told = {"sweep": self._sweep, "searching": self._searching, "heartbeat": moment}
        mine = workers.c.id == self.me.id
        if connection.execute(update(workers).where(mine).values(told)).rowcount == 0:
            connection.execute(insert(workers).values(study=self._study, started=moment, **self.me.row(), **told))

    # heartbeats

    @property
    def _stale_s(self) -> float:
        return STALE_BEATS * self._beat_s

    def _beating(self) -> None:
        while not self._stop.wait(self._beat_s):
            with contextlib.suppress(StoreError):  # who works will notice it too, and say so
                with self._store.writing() as connection:
                    self._write(connection)
                moment = time.monotonic()
                if moment - self._last_beat > self._stale_s:
                    self._steady_since = moment
                self._last_beat = moment

    def _is_dead(self, row: RowMapping, moment: float, *, certain: bool = False) -> bool:
        """Whether a worker is gone: by the process table where that shows it, else by its heartbeats.

        A process that is there and silent is stopped or stuck, and others go on without it: what it brings later is
        not taken. On a file, where the second command is refused, it is not given up.

        After a time in which this process did not reach the database itself (it was stopped, the server or the network
        was down), nobody's silence means anything until everybody has had the time to be heard again.
        """
        seen = Worker.of(row).is_seen()
        if seen is False or (seen and self._alone):
            return not seen
        here = time.monotonic()
        steady = here - self._last_beat <= self._stale_s < here - self._steady_since
        return (certain or steady) and moment - row["heartbeat"] > self._stale_s

    # the others

    @patient
    def look(self) -> View:
        """How things stand; workers that have died are buried, which makes orphans of their claims."""
        with self._store.reading() as connection:
            others = self._others(connection)
            found = standing(connection, self._study)
        dead = [row for row in others if self._is_dead(row, row["now"])]
        if dead:
            with self._store.writing() as connection:
                self._store.lock_study(connection, self._study)
                for row in dead:  # unless it has been heard meanwhile
                    same = (workers.c.id == row["id"]) & (workers.c.heartbeat == row["heartbeat"])
                    connection.execute(delete(workers).where(same))
                others = self._others(connection)
                found = standing(connection, self._study)
        mine = [(claim, sweep, there) for claim, sweep, there in found if claim.what == PROBE + self._kind]
        theirs = [(claim, sweep) for claim, sweep, there in mine if there and claim.worker != self.me.id]
        return View(
            taken=frozenset(claim.key for claim, _ in theirs),
            in_flight=sum(sweep == self._sweep for _, sweep in theirs),
            orphans=tuple(claim for claim, _, there in mine if not there),
            neighbours=sum(row["place"] == self.me.place for row in others),
            buried=tuple(str(Worker.of(row)) for row in dead),
        )

    @patient
    def there(self) -> set[str]:
        """The ids of the workers that are there, this one too."""
        with self._store.reading() as connection:
            return set(connection.execute(select(workers.c.id).where(workers.c.study == self._study)).scalars())

    def _others(self, connection: Connection) -> list[RowMapping]:
        query = select(workers, now(connection).label("now")).where(workers.c.study == self._study)
        return list(connection.execute(query.where(workers.c.id != self.me.id)).mappings())

    # claims

    @patient
    def claim_probe(self, key: str, seen: int, left: int) -> Claim | Refused:
        """Claim a candidate.

        Args:
            key: the candidate's.
            seen: the number of the last probe that was known when it was chosen.
            left: how many more probes the budget had then.
        """
        with self._store.writing() as connection:
            self._store.lock_study(connection, self._study)
            self._write(connection)
            last = connection.execute(select(func.max(probes.c.trial)).where(probes.c.study == self._study)).scalar()
            if (last or 0) > seen:
                return Refused.STALE
            found = standing(connection, self._study)
            others = [(c, sweep) for c, sweep, there in found if there and c.worker != self.me.id]
            in_flight = sum(c.what == PROBE + self._kind and sweep == self._sweep for c, sweep in others)
            if in_flight >= left or any(c.what == FINALS + self._kind for c, _ in others):
                return Refused.FULL
            return take(
                connection,
                self._study,
                PROBE + self._kind,
                key,
                self.me.id,
                self._sweep,
                found,
                PROBE_ATTEMPTS,
            )

    @patient
    def claim_finals(self) -> Claim | None:
        """Claim the finals of this sweep; None while another worker may find something, or holds finals.

        Raises:
            InfraError: three workers have died while they held them.
        """
        with self._store.writing() as connection:
            self._store.lock_study(connection, self._study)
            self._write(connection)
            found = standing(connection, self._study)
            searching = (workers.c.study == self._study) & (workers.c.id != self.me.id) & workers.c.searching
            if connection.execute(
                select(workers.c.id).where(searching, workers.c.sweep == self._sweep)
            ).first() is not None or any(
                there and claim.worker != self.me.id and claim.what in (PROBE + self._kind, FINALS + self._kind)
                for claim, _, there in found
            ):
                return None
            taken = self._take(connection, FINALS + self._kind, found, FINALS_ATTEMPTS)
        if taken is Refused.DEADLY:
            raise InfraError(
                f"{FINALS_ATTEMPTS} workers died while they confirmed the best candidates of study {self._study}",
                "see what ends them; everything measured is kept, and objective.finalists=1 confirms fewer",
            )
        return taken if isinstance(taken, Claim) else None

    @patient
    def release(self, claim: Claim) -> None:
        """Give a claim back without a result."""
        with self._store.writing() as connection:
            give_back(connection, claim)

    @contextmanager
    def mending(self) -> Iterator[None]:
        """Nobody else brings the sweep's Optuna study up to date meanwhile."""
        while (claim := self._claim_mending()) is None:
            self.look()  # who had it may be dead
            time.sleep(_POLL_S)
        yield
        self.release(claim)  # where it comes to nothing, leaving gives it back

    @patient
    def _claim_mending(self) -> Claim | None:
        with self._store.writing() as connection:
            self._store.lock_study(connection, self._study)
            self._write(connection)
            taken = self._take(connection, MENDING, standing(connection, self._study), MENDING_ATTEMPTS)
        return taken if isinstance(taken, Claim) else None

    def _take(
        self, connection: Connection, what: str, found: list[tuple[Claim, str | None, bool]], attempts: int
    ) -> Claim | Refused:
        key = hashlib.sha256((self._sweep or "").encode()).hexdigest()[:16]
        return take(connection, self._study, what, key, self.me.id, self._sweep, found, attempts)
