"""The tables as the newest migration leaves them; all are prefixed, because Optuna's live in the same database."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

# JSON is kept as text: Python writes and reads the NaN of a diverged loss, a database's own JSON type refuses it.

schema = Table(
    "autotune_schema",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("name", String(100), nullable=False),
    Column("applied", String(40), nullable=False),
)

studies = Table(
    "autotune_studies",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("workload", Text, nullable=False),
    Column("workload_digest", String(16), nullable=False),
    Column("machine", Text, nullable=False),
    Column("machine_fingerprint", String(16), nullable=False),
    Column("created", String(40), nullable=False),
    Column("baseline_key", String(12)),
    Column("winner_trial", Integer),
)

probes = Table(
    "autotune_probes",
    metadata,
    Column("study", String(255), ForeignKey("autotune_studies.name"), primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("key", String(12), nullable=False),
    Column("candidate", Text, nullable=False),
    Column("outcome", String(20), nullable=False, index=True),
    Column("phase", String(20)),
    Column("tokens_per_s", Double),
    Column("tokens_per_s_low", Double),
    Column("tokens_per_s_high", Double),
    Column("step_s", Double),
    Column("peak_allocated_bytes", BigInteger),
    Column("peak_reserved_bytes", BigInteger),
    Column("device_total_bytes", BigInteger),
    Column("host_peak_bytes", BigInteger),
    Column("probe_kind", String(20), nullable=False),
    Column("wall_s", Double, nullable=False),
    Column("overhead_s", Double),
    Column("inferred", Boolean, nullable=False),
    Column("reused", Boolean, nullable=False),
    Column("confirmation", Boolean, nullable=False),
    Column("reuse_key", String(64), index=True),
    Column("optuna_study", String(512)),
    Column("optuna_number", Integer),
    Column("created", String(40), nullable=False),
    Column("rest", Text, nullable=False),
    Column("uid", String(32)),
    Column("worker", String(300)),
    Index("ix_autotune_probes_uid", "uid", unique=True),
)

workers = Table(
    "autotune_workers",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("study", String(255), nullable=False, index=True),
    Column("family", String(32), nullable=False),
    Column("host", String(255), nullable=False),
    Column("place", String(100), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process_started", Double, nullable=False),
    Column("sweep", String(512)),
    Column("searching", Boolean, nullable=False),
    Column("started", Double, nullable=False),
    Column("heartbeat", Double, nullable=False),
)

claims = Table(
    "autotune_claims",
    metadata,
    Column("study", String(255), primary_key=True),
    Column("what", String(40), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("worker", String(32), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("sweep", String(512)),
    Column("claimed", Double, nullable=False),
)

MEASUREMENT_COLUMNS = (
    "outcome",
    "phase",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "step_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_total_bytes",
    "host_peak_bytes",
    "probe_kind",
    "wall_s",
    "overhead_s",
)
"""The fields of a Measurement that have their own column; `rest` holds the others."""
