"""The typed settings behind conf/: composed by Hydra, checked by dataclasses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import II, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.override import composition_error, names, no_setting, put, strangers
from autotune.workload.workload import PRECISIONS, Model, Workload


@dataclass
class SpaceSettings:
    """One value per knob: a scalar fixes it, a list is a choice, `{low, high, step|log}` is a range.

    `null` leaves the knob at its default (accumulation: whatever the global batch asks for).
    """

    name: str = "???"
    micro_batch: Any = None
    accumulation: Any = None
    zero_stage: Any = None
    precision: Any = None
    offload_optimizer: Any = None
    offload_param: Any = None
    checkpoint_blocks: Any = None
    checkpoint_part: Any = None
    checkpoint_input: Any = None
    overlap_comm: Any = None
    reduce_bucket_size: Any = None
    allgather_bucket_size: Any = None
    stage3_prefetch_bucket_size: Any = None
    stage3_param_persistence_threshold: Any = None
    stage3_max_live_parameters: Any = None
    stage3_max_reuse_distance: Any = None
    zero_hpz_partition_size: Any = None
    expandable_segments: Any = None
    garbage_collection_threshold: Any = None
    nvme_path: str | None = None


@dataclass
class SearchSettings:
    """How candidates are chosen.

    Attributes:
        name: auto, tpe, random, grid or gp.
        seed: of the sampler.
        patience: the search ends after this many probes without a better one; 0 for never.
    """

    name: str = "auto"
    seed: int = 0
    patience: int = 0


@dataclass
class ProbeSettings:
    """How one candidate is measured.

    Attributes:
        name: auto, torchrun or virtual.
        warmup_steps: optimizer steps that are run and not measured; states exist after the first.
        steps: measured optimizer steps of a probe of the search.
        confirm_steps: measured optimizer steps of a finalist; fewer than 11 say nothing about memory that creeps.
        deadline_s: a probe of the search that takes longer is ended as `timeout`, seconds; a confirmation has more
            in proportion to the micro-steps that it makes.
        threads: processor threads per rank; None shares the cores equally.
        stop_losers: end a probe early whose best step cannot reach the best candidate so far.
        host_reserve_gib: when less host memory than that is available, GiB, the probe is ended as `oom_host`, before
            the kernel ends some other process; None for 2 % of the host's memory, 0.5 GiB at least and 8 at most.
        parallel: probes that one command runs at the same time, each on its own share of the devices; neighbours
            disturb each other's timings, so 1 unless asked for.
        devices: which of the devices here this command uses (on CPU: which processors); None for all.
    """

    name: str = "auto"
    warmup_steps: int = 2
    steps: int = 5
    confirm_steps: int = 15
    deadline_s: float = 600.0
    threads: int | None = None
    stop_losers: bool = True
    host_reserve_gib: float | None = None
    parallel: int = 1
    devices: list[int] | None = None


@dataclass
class LauncherSettings:
    """How ranks are started.

    Attributes:
        name: `warm` (forked from a process that has imported everything), `cold` (a torchrun for each probe), or, on
            several nodes, `slurm` (a step for each probe) or `hosts` (over ssh).
        python: on the nodes; None for the path of the one here.
        start_s: the nodes may take so long to start their part of a probe, seconds; no part of its deadline.
        partition, account, time: of the allocation that `slurm` submits where there is none.
        sbatch_args, srun_args: what else those commands are given, as in a shell.
        hostfile: of `hosts`, as DeepSpeed's launcher takes it.
        ssh_options: what else ssh is given, as in a shell.
    """

    name: str = "warm"
    python: str | None = None
    start_s: float = 300.0
    partition: str | None = None
    account: str | None = None
    time: str = "4:00:00"
    sbatch_args: str = ""
    srun_args: str = ""
    hostfile: str | None = None
    ssh_options: str = ""


@dataclass
class ObjectiveSettings:
    """What the best candidate is best at.

    Attributes:
        name: throughput (global tokens per second).
        finalists: how many of the best are measured again, longer, before one of them wins.
    """

    name: str = "throughput"
    finalists: int = 3


@dataclass
class StudySettings:
    """Where measurements are kept.

    Attributes:
        name: None for model-machine.
        store: SQLAlchemy URL; None is `autotune.db` in the output folder.
        reconnect_s: how long a database that does not answer any more is waited for, seconds.
        heartbeat_s: how often a worker tells the others that it is there; after six missed ones it counts as dead.
    """

    name: str | None = None
    store: str | None = None
    reconnect_s: float = 120.0
    heartbeat_s: float = 5.0


@dataclass
class BudgetSettings:
    """How much a sweep may spend.

    Attributes:
        probes: candidates probed for search; None for 40 where they are measured, 1,000 where they are predicted.
        minutes: of wall clock; None for no limit.
    """

    probes: int | None = None
    minutes: float | None = None


@dataclass
class Settings:
    """Everything that one sweep needs to know. See conf/config.yaml for what each section is for."""

    model: Model = field(default_factory=Model)
    machine: Machine = field(default_factory=Machine)
    workload: Workload = field(default_factory=Workload)
    space: SpaceSettings = field(default_factory=SpaceSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    launcher: LauncherSettings = field(default_factory=LauncherSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    study: StudySettings = field(default_factory=StudySettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    output: str = "studies"

    @property
    def store_url(self) -> str:
        """The SQLAlchemy URL of the database, with the driver written out."""
        return normalise_store(self.study.store or f"sqlite:///{Path(self.output) / 'autotune.db'}")

    @property
    def study_name(self) -> str:
        """The study's name: the one given, else model-machine, with nodes × devices (left out for the default cpu)."""
        if self.study.name:
            return self.study.name
        machine = self.machine
        shape = f"-{machine.nodes}x{machine.devices_per_node}"
        plain = machine.accelerator == "cpu" and (machine.nodes, machine.devices_per_node) == (1, 2)
        return f"{self.model.name}-{machine.name}{'' if plain else shape}"

    @property
    def study_dir(self) -> Path:
        """The folder that takes the study's files."""
        return Path(self.output) / self.study_name


def normalise_store(url: str) -> str:
    """Write out the driver: `postgresql://` means different drivers to different SQLAlchemy versions."""
    for short in ("postgresql://", "postgres://"):
        if url.startswith(short):
            return "postgresql+psycopg://" + url.removeprefix(short)
    return url


def config_dir() -> Path:
    """The folder conf/: inside the package in a wheel, beside it in a checkout."""
    inside = Path(__file__).with_name("conf")
    return inside if inside.is_dir() else Path(__file__).resolve().parents[1] / "conf"


def register_schema() -> None:
    """Make the dataclasses known to Hydra as the schema that conf/config.yaml extends, and give it `${detect:…}`."""
    from autotune.machine.detect import register_resolver

    schema = Settings(workload=Workload(model=II("model")))
    ConfigStore.instance().store(name="settings", node=schema)
    register_resolver(config_dir() / "machine")


def compose_settings(overrides: list[str]) -> Settings:
    """The settings for a list of Hydra overrides, for verbs and tests that are no Hydra application.

    Raises:
        SettingsError: Hydra refuses an override, or a value cannot mean anything.
    """
    register_schema()
    with settings_errors(), initialize_config_dir(str(config_dir()), version_base="1.3"):
        return from_config(compose("config", put(overrides)))


class settings_errors:
    """Turns Hydra's and OmegaConf's errors into one sentence and a hint."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, HydraException | OmegaConfBaseException):
            raise composition_error(error, names(Settings)) from error


def from_config(config: DictConfig) -> Settings:
    """The checked settings of a composed configuration, its machine detected where it asks for that.

    Raises:
        SettingsError: a value is missing or cannot mean anything.
    """
    with settings_errors():
        settings = OmegaConf.to_object(config)
    assert isinstance(settings, Settings)
    if added := strangers(settings):
        raise no_setting(added[0], names(Settings))
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Refuse what no sweep could mean.

    Raises:
        SettingsError: naming the setting, what it may be, and what to do.
    """
    workload, machine = settings.workload, settings.machine
    name = settings.study.name
    if name is not None and (Path(name).name != name or name == ".."):
        raise SettingsError(
            f"study.name={name} is no name of a folder", "leave out slashes; output=… says where it lies"
        )
    for name in ("tensor_parallel", "sequence_parallel"):
        if getattr(workload, name) != 1:
            raise SettingsError(
                f"workload.{name}={getattr(workload, name)} is not supported yet: candidates are data-parallel only",
                f"leave workload.{name} at 1; results would silently be those of a data-parallel run otherwise",
            )
    if workload.precision not in PRECISIONS:
        raise SettingsError(f"workload.precision={workload.precision} is unknown", f"one of {', '.join(PRECISIONS)}")
    if machine.world_size < 1:
        raise SettingsError(
            f"the machine has no devices ({machine.nodes} nodes × {machine.devices_per_node} devices)",
            "machine.nodes and machine.devices_per_node are at least 1",
        )
    if not 0 <= machine.headroom < 1:
        raise SettingsError(f"machine.headroom={machine.headroom} is no share", "0.05 leaves 5 % of the memory free")
    positive = {
        "machine.device_memory_gib": machine.device_memory_gib,
        "workload.seq_len": workload.seq_len,
        "probe.steps": settings.probe.steps,
        "probe.warmup_steps": settings.probe.warmup_steps,
        "probe.confirm_steps": settings.probe.confirm_steps,
        "probe.deadline_s": settings.probe.deadline_s,
        "objective.finalists": settings.objective.finalists,
        "launcher.start_s": settings.launcher.start_s,
        "probe.parallel": settings.probe.parallel,
        "study.reconnect_s": settings.study.reconnect_s,
        "study.heartbeat_s": settings.study.heartbeat_s,
    }
    positive |= {"workload.global_batch": workload.global_batch} if workload.global_batch is not None else {}
    positive |= {"budget.probes": settings.budget.probes} if settings.budget.probes is not None else {}
    positive |= {"budget.minutes": settings.budget.minutes} if settings.budget.minutes is not None else {}
    positive |= {"probe.threads": settings.probe.threads} if settings.probe.threads is not None else {}
    reserve = settings.probe.host_reserve_gib
    positive |= {"probe.host_reserve_gib": reserve} if reserve is not None else {}
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise SettingsError(
                f"{name}={value} must be above 0 and finite", "see `--cfg job --resolve` for the default"
            )
    model = settings.model
    if not model.type and not model.factory:
        raise SettingsError(
            f"model={model.name} has neither a transformers type nor a factory",
            "model=custom takes model.factory=package.module:function",
        )
    if model.factory and ":" not in model.factory:
        raise SettingsError(f"model.factory={model.factory} names no function", "write package.module:function")


def environment_store() -> str | None:
    """The store that AUTOTUNE_STORE names."""
    return os.environ.get("AUTOTUNE_STORE") or None
