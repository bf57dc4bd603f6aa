"""One sweep from settings to winner, readable top to bottom."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import SettingsError
from autotune.export.deepspeed import write_winner
from autotune.machine.detect import not_here_reason
from autotune.machine.health import look
from autotune.machine.share import occupied, shares
from autotune.probe.measurement import VIRTUAL
from autotune.probe.prober import ModelProber
from autotune.probe.torchrun.describe import Description
from autotune.probe.torchrun.launcher import Tell
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.probe.torchrun.remote.reach import REMOTE, check_reach
from autotune.report.summary import print_summary
from autotune.report.terminal import Progress, progress
from autotune.search.result import Result
from autotune.search.search import Search
from autotune.settings import Settings
from autotune.siblings import Place, Siblings
from autotune.space.knobs import BY_NAME
from autotune.space.needs import impossibility
from autotune.space.space import Space
from autotune.store.store import Store

VERSIONED = ("torch", "deepspeed", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
RECORDED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "DS_PIN_MEMORY_BACKEND")
NEIGHBOURS = "{} probes run at a time and disturb each other's timings; the best are confirmed one by one"


def tune(settings: Settings, place: Place | None = None) -> tuple[Result, list[Path]]:
    """Sweep, confirm, write the winner's files and print the summary. Where candidates are predicted, that comes first.

    Args:
        settings: of the sweep.
        place: which of a command's workers this process is; None for the command itself.

    Returns:
        What was found, and the files that were written.

    Raises:
        SettingsError, NothingFeasible, InfraError, StoreError: see Search.run.
        KeyboardInterrupt: interrupted; everything measured is stored, and no process of ours is left.
    """
    kind, reason = chosen(settings)
    check_shares(kind, settings)
    if kind == VIRTUAL:
        print(planning(settings, reason), file=sys.stderr, flush=True)
    space = Space(settings)  # what cannot mean anything is refused before anything is made
    store = Store.open(settings.store_url)
    try:
        store.patience.seconds = settings.study.reconnect_s
        # Known before anything is started: a study that another command tunes, or of another workload or machine.
        crew = store.crew(settings.study_name, place.family if place else None, settings.study.heartbeat_s)
        crew.join()
        store.open_study(settings.study_name, settings.workload, settings.machine)
        earlier = [probe for probe in store.probes(settings.study_name) if probe.measurement.probe_kind == kind]
        with ExitStack() as ending:
            seen = ending.enter_context(progress(sys.stderr, settings.machine, settings.budget.minutes, earlier))
            # A command looks before its own workers are at work, who would be someone else's.
            local = kind != VIRTUAL and settings.launcher.name not in REMOTE
            found = look(settings.machine) if local and place is None else []
            for sentence in found:
                seen.noticed(sentence)
            alone = settings.probe.parallel == 1 or place is not None
            siblings = None if alone else Siblings(settings, crew.me.family, seen.waiting)
            if siblings is not None:
                ending.callback(siblings.close)
                seen.waiting(NEIGHBOURS.format(settings.probe.parallel))
            recorded = {name: os.environ[name] for name in RECORDED if name in os.environ}
            ending.enter_context(
                occupied(settings.machine, settings.probe.devices, settings.probe.parallel, place.index if place else 0)
            )
            prober = make_prober(kind, settings, seen.telling, found)
            settings, space, result = sweep(settings, space, store, prober, seen, recorded)
            wins = store.study(settings.study_name).winner_trial == result.winner.trial
            folder = settings.study_dir if wins else settings.study_dir / "planned"  # beside a measured winner's files
            files = write_winner(result.winner, settings.workload, settings.machine, folder, settings.space.nvme_path)
            if siblings is not None:
                siblings.wait()
    finally:
        store.close()
    print_summary(sys.stdout, settings.machine, result, space.ledger.summary(), files)
    return result, files


def sweep(
    settings: Settings,
    space: Space,
    store: Store,
    prober: ModelProber,
    seen: Progress,
    recorded: dict[str, str],
) -> tuple[Settings, Space, Result]:
    """Look at the model, then search and confirm; (settings as they fit the model, space, result)."""
    try:
        model = described(prober.describe())
        if fitted := fitted_buckets(settings, model):
            settings = fitted
            space = Space(settings)
        search = Search(
            settings,
            space,
            store,
            prober,
            environment=environment(model, prober) | recorded,
            observer=seen,
            impossible=impossibility(
                space.candidates,
                model.parameters,
                model.not_checkpointed,
                settings.workload,
                settings.machine,
            ),
        )
        return settings, space, search.run()
    finally:
        prober.close()


def chosen(settings: Settings) -> tuple[str, str]:
    """(`torchrun` or `virtual`, why candidates are predicted and not measured).

    Raises:
        SettingsError: there is no such probe, or it cannot measure on the machine here.
    """
    name = settings.probe.name
    if name not in ("auto", "torchrun", VIRTUAL):
        raise SettingsError(f"probe={name} is unknown", f"auto, torchrun or {VIRTUAL}")
    if name == VIRTUAL:
        return VIRTUAL, f"probe={VIRTUAL} asks for it"
    if settings.launcher.name in REMOTE:
        check_reach(settings)
        return "torchrun", ""  # what the nodes are is looked at there: here may be no device at all
    reason = not_here_reason(settings.machine)
    if reason and name == "torchrun":
        raise SettingsError(reason, f"run it on that machine, or plan for it here with probe={VIRTUAL}")
    return (VIRTUAL, reason) if reason else ("torchrun", "")


def check_shares(kind: str, settings: Settings) -> None:
    """Refuse devices that cannot be shared out.

    Raises:
        SettingsError: nothing is measured here, a device is not here, or the machine does not fit in a share.
    """
    probe = settings.probe
    if probe.parallel == 1 and probe.devices is None:
        return
    if kind == VIRTUAL or settings.launcher.name in REMOTE:
        where = "nothing is measured" if kind == VIRTUAL else f"launcher={settings.launcher.name} measures elsewhere"
        raise SettingsError(
            f"probe.parallel and probe.devices share out the devices of this machine, and {where}",
            "leave them out; several commands work on one study with study.store=postgresql://…",
        )
    shares(settings.machine, probe.devices, probe.parallel)


def planning(settings: Settings, reason: str) -> str:
    """The sentence that comes before all else where nothing is measured."""
    machine, model = settings.machine, settings.model
    shape = f"{machine.nodes} × {machine.devices_per_node} devices"
    published = f", on which {model.name} was published" if model.published_on == machine.name else ""
    return f"planning for {machine.name} ({shape}{published}) because {reason}; nothing is measured"


def make_prober(kind: str, settings: Settings, tell: Tell, devices: Sequence[str] = ()) -> ModelProber:
    """The prober of that kind; nothing is started yet. `devices` is what was found of them (see health.py).

    Raises:
        SettingsError: there is no such launcher.
    """
    if kind == VIRTUAL:
        from autotune.probe.virtual.prober import VirtualProber

        return VirtualProber(settings, tell)
    return TorchrunProber(settings, make_launcher(settings, tell), devices)


def described(model: Description) -> Description:
    """The description of a model that can be trained.

    Raises:
        SettingsError: it cannot: there is no such type, or the factory cannot be imported.
    """
    if model.parameters == 0:
        raise SettingsError("the model has no parameters to train", "let model.factory return a module that has some")
    if model.error:
        raise SettingsError(model.error, "mend model.type and model.config, or model.factory=package.module:function")
    return model


def fitted_buckets(settings: Settings, model: Description) -> Settings | None:
    """The settings with buckets that the space leaves at DeepSpeed's default made no larger than the model.

    A larger bucket never fills, but DeepSpeed allocates it whole: 1 GB of bf16 for a model of any size. None where
    nothing changes.
    """
    if model.parameters is None:
        return None
    even = model.parameters + model.parameters % 2  # DeepSpeed refuses an odd allgather_bucket_size
    changes: dict[str, Any] = {}
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        default = BY_NAME[name].default
        assert isinstance(default, int)
        if getattr(settings.space, name) is None and even < default:
            changes[name] = even
    return replace(settings, space=replace(settings.space, **changes)) if changes else None


def environment(model: Description, prober: ModelProber) -> dict[str, Any]:
    """What else must be equal for a measurement to be reused: versions, threads, the model's source."""
    versions = {}
    for package in VERSIONED:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": sys.version.split()[0],
        **versions,
        "protocol": prober.protocol,
        "threads": prober.threads,
        "source": model.source,
    }
