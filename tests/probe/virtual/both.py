"""Runs cases for real (two ranks under gloo) and virtually, and compares the tapes of rank 0 and 1.

A program of its own, because both change their process: `python tests/probe/virtual/both.py CASES.json OUT.json`.
Every run is forked from this process, which has imported everything and computed nothing.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401 - imported once, before forking

from autotune.candidate import Candidate
from autotune.probe.torchrun import preload
from autotune.probe.virtual import device, kernels, world
from autotune.probe.virtual.compute import VirtualRecorder
from autotune.probe.virtual.engine import Engine
from autotune.probe.virtual.recorder import Recorder
from autotune.probe.virtual.scope import Scope
from autotune.probe.virtual.tape import Kind, Tape, TapeWriter
from autotune.settings import compose_settings
from autotune.space.config import deepspeed_config

WORLD = 2


def trace(case: dict[str, Any], rank: int, recorder: Recorder, join: Any) -> Tape:
    settings = compose_settings(["model=gpt_tiny", "machine=cpu", *case["overrides"]])
    candidate = Candidate.from_dict(case["candidate"])
    config = deepspeed_config(candidate, settings.workload, settings.machine)
    join(settings.machine)
    engine = Engine(settings.workload, settings.machine, config, rank, torch.device("cpu"), recorder)
    gc.disable()  # garbage would be collected at other points, since the two run other code of their own
    with recorder:
        engine.build(candidate.zero_stage, candidate.precision, fill=True)
        engine.checkpoint(candidate)
        engine.initialise()
        for _ in range(2):
            engine.step(candidate.micro_batch, candidate.accumulation)
    return recorder.writer.tape()


def real(case: dict[str, Any], rank: int, folder: Path) -> Tape:
    def join(machine: Any) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
        settle(dist.Work)
        store = dist.FileStore(str(folder / "store"), WORLD)
        dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    writer = TapeWriter()
    tape = trace(case, rank, Recorder(writer, Scope(writer)), join)
    dist.barrier()
    return tape


def settle(work: Any) -> None:
    """After a wait, have gloo's threads let go of the tensors, so that deaths come in a fixed order.

    A wait returns while the thread that did the work may still hold it, for as long as its processor is another's: so
    it is over only when no other thread of this process runs or could.
    """
    wait = work.wait

    def patient(self: Any, *args: Any) -> Any:
        done = wait(self, *args)
        quiet = 0
        while quiet < 2:  # a thread that waits for a lock for a moment looks like an idle one
            time.sleep(0.0003)
            quiet = 0 if others_run() else quiet + 1
        return done

    work.wait = patient


def others_run() -> bool:
    """Whether a thread of this process other than the caller's does something or would, had it a processor."""
    own = str(threading.get_native_id())
    stats = (task / "stat" for task in Path("/proc/self/task").iterdir() if task.name != own)
    return any(stat.read_text().rpartition(")")[2].split()[0] != "S" for stat in stats)


def virtual(case: dict[str, Any], rank: int) -> Tape:
    writer = TapeWriter()
    recorder = VirtualRecorder(writer, Scope(writer))
    device.adapt_torch()
    world.hold_as_gloo()
    kernels.replace_deepspeed_operations(recorder)
    recorder.slice_quickly()
    return trace(case, rank, recorder, lambda machine: world.join_world(rank, machine))


def fork(work: Any, path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        work().save(path)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must never return
        traceback.print_exc()
    finally:
        os._exit(code)


def events(tape: Tape) -> tuple[list[tuple[Any, ...]], dict[str, tuple[int, int]]]:
    """(what happened from initialising on, storages by number; phase of the second step → peak and live)."""
    names, seen, out = tape.names, {}, []
    live, peaks, phase = 0, {}, ""
    for kind, _, _, op, _, ident, size in tape.rows.tolist():
        if kind == Kind.PHASE:
            phase = names[op]
            peaks[phase] = (live, live)
            if phase == "init":  # loading gives weights their values, which is the probe's work and not training's
                out.clear()
            out.append((phase, ident))
        elif kind == Kind.ALLOC:
            seen[ident] = len(seen)
            live += size
            out.append(("alloc", names[op], seen[ident], size))
        elif kind == Kind.FREE:
            live -= size
            out.append(("free", seen[ident], size))
        elif not names[op].startswith("deepspeed::"):  # the stand-ins' kernels, which no dispatcher sees
            out.append((Kind(kind).name, names[op]))
        if phase:
            peaks[phase] = (max(peaks[phase][0], live), live)
    return out, peaks


def compare(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [fork(lambda r=r: real(case, r, folder), folder / f"real{r}.npz") for r in range(WORLD)]
        codes = [os.waitpid(pid, 0)[1] for pid in jobs]
        jobs = [fork(lambda r=r: virtual(case, r), folder / f"virtual{r}.npz") for r in range(WORLD)]
        codes += [os.waitpid(pid, 0)[1] for pid in jobs]
        if any(codes):
            return {"name": case["name"], "failed": codes}
        result: dict[str, Any] = {"name": case["name"], "ranks": []}
        for rank in range(WORLD):
            one, one_peaks = events(Tape.load(folder / f"real{rank}.npz"))
            two, two_peaks = events(Tape.load(folder / f"virtual{rank}.npz"))
            first = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
            if first is None and len(one) != len(two):
                first = min(len(one), len(two))
            around = None if first is None else [one[first - 12 : first + 8], two[first - 12 : first + 8]]
            result["ranks"].append(
                {"events": len(one), "differs_at": first, "around": around, "real": one_peaks, "virtual": two_peaks}
            )
        return result


if __name__ == "__main__":
    preload.prepare(operations=True)
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([compare(case) for case in cases]))
