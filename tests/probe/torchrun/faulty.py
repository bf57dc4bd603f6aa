"""A small custom model that fails on request, in a phase, on one rank: what users' own models do at night."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.probe.torchrun.spec import RankResult

RANK = int(os.environ.get("RANK", "0"))
FAULTY_RANK = 1
CGROUPS = Path("/sys/fs/cgroup")
HOST_LIMIT = 64 * 2**20


def memory_controller() -> Path | None:
    """The folder in which this user may make memory control groups, None where there is none (version 1 or 2)."""
    for folder, file in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        trial = folder / f"autotune-{os.getpid()}"
        try:
            trial.mkdir()
        except OSError:
            continue
        found = (trial / file).exists()
        trial.rmdir()
        if found:
            return folder
    return None


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Backward(torch.autograd.Function):
    """The identity, whose gradient goes through a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.change(gradient), None


class Model(nn.Module):
    """Token embedding, blocks, a loss, and the fault."""

    def __init__(self, fault: Fault, width: int, blocks: int) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.overflows = 3
        register_optimizer_step_pre_hook(lambda *_: fault.strike("step"))

    def to(self, *args: Any, **kwargs: Any) -> Model:  # what DeepSpeed does first of all when it initialises
        self.fault.strike("init")
        return super().to(*args, **kwargs)

    def forward(self, tokens: torch.Tensor) -> Any:
        kind = self.fault.kind
        x = self.embed(tokens)
        for block in self.blocks:
            x = block.forward(x) if kind == "bypass" else block(x)
        x = Backward.apply(x, self.backward)
        loss = (x @ self.embed.weight.T).float().logsumexp(-1).mean()
        self.fault.strike("forward")
        if kind == "not_finite" and self.fault.at == "forward" and RANK == FAULTY_RANK:
            return loss * float("nan")
        if kind == "sum":
            return loss * len(tokens)
        return {"loss": loss} if kind != "no_loss" else {"logits": x}

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.fault.strike("backward")
        if self.fault.kind == "overflow" and self.overflows:
            self.overflows -= 1
            return gradient * float("inf")
        spoilt = self.fault.kind == "not_finite" and self.fault.at == "backward" and RANK == FAULTY_RANK
        return gradient * float("nan") if spoilt else gradient


class Fault:
    """Something that goes wrong on one rank, in one phase.

    Args:
        kind: what.
        at: load, init, forward, backward or step.
        mark: a file that gets the time (CLOCK_MONOTONIC, which all processes share) at which it happens.
    """

    def __init__(self, kind: str, at: str, mark: str) -> None:
        self.kind, self.at, self.mark = kind, at, mark
        self.kept: list[torch.Tensor] = []

    def strike(self, phase: str) -> None:
        strike = getattr(self, self.kind, None)
        if strike is None or phase != self.at or RANK != FAULTY_RANK:
            return
        if self.mark:
            Path(self.mark).write_text(str(time.monotonic()))
        strike()

    def raises(self) -> None:
        raise RuntimeError("the model says no")

    def refuses(self) -> None:
        raise ValueError("the model says no")

    def cannot_read(self) -> None:
        raise OSError("cannot read the weights")

    def disk_full(self) -> None:
        raise OSError(28, "No space left on device")

    def memory(self) -> None:
        raise MemoryError

    def adjusted(self) -> None:
        raise ValueError(f"oom_score_adj is {Path('/proc/self/oom_score_adj').read_text()}")

    def eat(self) -> None:
        """Take the host's memory, 30 MB at a time."""
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1024)) * 30_000)
            time.sleep(0.01)

    def leak(self) -> None:
        """Keep two megabytes more at every micro-step."""
        self.kept.append(torch.empty(2**19))

    def oom(self) -> None:
        torch.zeros(2**30, dtype=torch.uint8)

    def hang(self) -> None:
        time.sleep(600)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def vanish(self) -> None:
        os._exit(0)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def orphan(self) -> None:
        """Die with every connection still open in a child: peers wait in their collective for ever."""
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)

    def kernel(self) -> None:
        """Be killed by the kernel, because a control group's memory runs out."""
        folder = memory_controller()
        assert folder is not None
        group = folder / f"autotune-test-{os.getpid()}"
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if folder.name == "memory" else "memory.max")
        limit.write_text(str(HOST_LIMIT))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        bytearray(2 * HOST_LIMIT)

    def told(self) -> None:
        """Be killed just after the result is written: torch's agent waits for more than that."""
        whole = RankResult.write

        def write(result: RankResult, directory: str | Path) -> None:
            whole(result, directory)
            os.kill(os.getpid(), signal.SIGKILL)

        RankResult.write = write  # type: ignore[method-assign]

    def thread(self) -> None:
        """Leave a thread behind that never ends."""
        threading.Thread(target=time.sleep, args=(600,)).start()

    def torn(self) -> None:
        """Write half of the result and be gone."""

        def write(result: RankResult, directory: str | Path) -> None:
            (Path(directory) / f"rank{result.rank}.json").write_text('{"schema": 1, "rank": ')
            os._exit(0)

        RankResult.write = write  # type: ignore[method-assign]

    def clock_set_back(self) -> None:
        """Have the time of day jump to an hour ago."""
        now = time.time
        time.time = lambda: now() - 3600

    def says_error(self) -> None:
        os.write(2, b"Error: this is only a warning. Traceback (most recent call last): CUDA out of memory\n")


def build(
    fault: str = "none", at: str = "forward", mark: str = "", width: int = 64, blocks: int = 4
) -> tuple[nn.Module, Any]:
    """The factory."""
    planned = Fault(fault, at, mark)
    planned.strike("load")

    def make_batch(sequences: int, seq_len: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(0, 256, (sequences, seq_len), device=device)}

    return Model(planned, width, blocks), make_batch
