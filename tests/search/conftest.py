"""A plausible table (a 7-billion-parameter model on eight devices, as a formula) and sweeps over it."""

from __future__ import annotations

import math
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.table import TableProber
from autotune.search.observer import Observer
from autotune.search.result import Result
from autotune.search.search import Search
from autotune.settings import BudgetSettings, SearchSettings, Settings, SpaceSettings
from autotune.space.space import Space
from autotune.store.records import ProbeRecord
from autotune.store.store import Store
from autotune.workload.phase import Phase
from autotune.workload.workload import Model, Workload

MACHINE = Machine(
    name="table",
    device="formula",
    nodes=1,
    devices_per_node=8,
    device_memory_gib=80.0,
    host_memory_gib=1000.0,
    cores=64,
)
PARAMETERS = 7e9
SEQ_LEN = 2048
ACTIVATIONS = 9e9  # bytes per sequence without checkpointing
SHARE = {"none": 0.0, "quarter": 0.25, "half": 0.5, "all": 1.0}
PART = {"whole": (0.92, 0.33), "attention": (0.35, 0.12), "mlp": (0.5, 0.2), None: (0.0, 0.0)}


def needed_bytes(candidate: Candidate, parameters: float = PARAMETERS) -> int:
    """What one device holds at the worst moment of a step."""
    world, stage = MACHINE.world_size, candidate.zero_stage
    weights = 0.0 if candidate.offload_param else 2 * parameters / (world if stage == 3 else 1)
    gradients = 2 * parameters / (world if stage >= 2 else 1)
    if stage == 2 and candidate.accumulation > 1:
        gradients += 0.5 * parameters  # averaged gradients are kept while accumulating
    states = 0.0 if candidate.offload_optimizer else 12 * parameters / (world if stage >= 1 else 1)
    saved, _ = PART[candidate.checkpoint_part]
    kept = 1 - SHARE[candidate.checkpoint_blocks] * saved
    if candidate.checkpoint_input == "cpu":
        kept *= 0.8
    return int(weights + gradients + states + candidate.micro_batch * ACTIVATIONS * kept + 3e9)


def tokens_per_s(candidate: Candidate, parameters: float = PARAMETERS) -> float:
    """Global tokens per second."""
    stage, micro = candidate.zero_stage, candidate.micro_batch
    _, again = PART[candidate.checkpoint_part]
    compute = 6 * parameters * SEQ_LEN * micro / 400e12 * (1 + again * SHARE[candidate.checkpoint_blocks])
    compute *= 1 + 0.5 / micro  # small micro-batches fill the device badly
    gather = (0.35 if stage == 3 else 0.0) + (0.9 if candidate.offload_param else 0.0)
    reduce = {0: 0.05, 1: 0.05, 2: 0.12, 3: 0.15}[stage]
    swap = 0.1 * micro if candidate.checkpoint_input == "cpu" else 0.0
    update = 2.5 if candidate.offload_optimizer else 0.15
    step = candidate.accumulation * (compute + gather + reduce + swap) + update
    wobble = 1 + 0.004 * math.sin(zlib.crc32(candidate.key.encode()))
    return candidate.accumulation * micro * MACHINE.world_size * SEQ_LEN / step * wobble


def measure(candidate: Candidate, parameters: float = PARAMETERS) -> Measurement:
    """The formula as a prober's table: an OOM above the device's memory, else ok."""
    need = needed_bytes(candidate, parameters)
    if need > MACHINE.device_memory_bytes:
        return Measurement(
            Outcome.OOM_DEVICE, "table", phase=Phase.BACKWARD, message="out of memory", needed_bytes=need, wall_s=3.0
        )
    speed = tokens_per_s(candidate, parameters)
    step = candidate.accumulation * candidate.micro_batch * MACHINE.world_size * SEQ_LEN / speed
    return Measurement(
        Outcome.OK,
        "table",
        phase=Phase.STEP,
        tokens_per_s=speed,
        tokens_per_s_low=speed * 0.995,
        tokens_per_s_high=speed * 1.005,
        step_s=step,
        step_times_s=[step] * 5,
        peak_allocated_bytes=int(need * 0.95),
        peak_reserved_bytes=need,
        wall_s=10.0,
    )


def make_settings(
    *, search: str = "auto", seed: int = 0, probes: int = 40, batch: int | None = 512, **knobs: object
) -> Settings:
    """Settings over the formula; `knobs` are those of the space."""
    space: dict[str, object] = {
        "micro_batch": [1, 2, 4, 8, 16, 32],
        "zero_stage": [0, 1, 2, 3],
        "offload_optimizer": [None, "cpu"],
        "offload_param": [None, "cpu"],
        "checkpoint_blocks": ["none", "quarter", "half", "all"],
        "checkpoint_part": ["whole", "attention", "mlp"],
        "checkpoint_input": ["device", "cpu"],
    }
    return Settings(
        model=Model("formula", type="gpt_neox"),
        machine=MACHINE,
        workload=Workload(Model("formula", type="gpt_neox"), seq_len=SEQ_LEN, global_batch=batch),
        space=SpaceSettings(name="test", **(space | knobs)),
        search=SearchSettings(name=search, seed=seed),
        budget=BudgetSettings(probes=probes),
    )


@dataclass
class Sweeper:
    """Runs sweeps of one store over the formula, or over another table."""

    store: Store
    table: Callable[[Candidate], Measurement] = measure
    prober: TableProber = field(init=False)
    search: Search = field(init=False)

    def prepare(self, settings: Settings, **more: Any) -> Search:
        self.prober = TableProber(self.table)
        self.search = Search(settings, Space(settings), self.store, self.prober, **more)
        return self.search

    def run(self, settings: Settings, **more: Any) -> Result:
        return self.prepare(settings, **more).run()

    def rows(self, study: str = "formula-table-1x8") -> list[ProbeRecord]:
        return self.store.probes(study)

    @property
    def probed(self) -> list[Candidate]:
        """What the last sweep started processes for, in order."""
        return [request.candidate for request in self.prober.requests if not request.confirmation]

    @property
    def confirmed(self) -> list[Candidate]:
        return [request.candidate for request in self.prober.requests if request.confirmation]


class Diary(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def started(self, overview: Any) -> None:
        self.entries.append(("started", overview))

    def probing(self, candidate: Candidate, number: int, left: int) -> None:
        self.entries.append(("probing", candidate, number, left))

    def finished(self, record: ProbeRecord) -> None:
        self.entries.append(("finished", record))

    def again(self, record: ProbeRecord, attempt: int) -> None:
        self.entries.append(("again", record, attempt))

    def searched(self, reason: str) -> None:
        self.entries.append(("searched", reason))

    def confirming(self, candidate: Candidate, number: int, of: int) -> None:
        self.entries.append(("confirming", candidate, number, of))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.entries if entry[0] == kind]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: a sweep commits some twenty times a probe."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with every table and no row: making them takes longer than most sweeps here."""
    path = tmp_path_factory.mktemp("empty") / "autotune.db"
    store = Store.open(f"sqlite:///{path}")
    store.optuna_storage()
    store.close()
    return path


@pytest.fixture
def url(folder: Path, empty: Path) -> str:
    shutil.copy(empty, folder / "autotune.db")
    return f"sqlite:///{folder / 'autotune.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store.open(url)
    yield opened
    opened.close()


@pytest.fixture
def sweeper(store: Store) -> Sweeper:
    return Sweeper(store)


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Makes settings over the formula: a small space that is listed whole, unless told otherwise."""

    def make(**more: Any) -> Settings:
        small = {
            "zero_stage": [1, 2],
            "micro_batch": [1, 2, 4, 8, 16],
            "offload_optimizer": None,
            "offload_param": None,
            "checkpoint_blocks": "none",
            "checkpoint_part": "whole",
            "checkpoint_input": "device",
        }
        return make_settings(**(small | more))

    return make


@pytest.fixture
def large() -> Callable[..., Settings]:
    """Makes settings over the whole formula: 1,026 candidates."""
    return make_settings


@pytest.fixture
def formula() -> Callable[..., Measurement]:
    return measure


@pytest.fixture
def diary() -> Diary:
    return Diary()
