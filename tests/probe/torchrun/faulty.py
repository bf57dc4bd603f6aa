"""A small custom model that fails on request, on one rank: what users' own models do at night."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
FAULTY_RANK = 1


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Overflowing(torch.autograd.Function):
    """The identity, whose gradient is infinite the first three times."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Overflowing.times += 1
        return gradient * float("inf") if Overflowing.times <= 3 else gradient


class Model(nn.Module):
    """Token embedding, blocks, a loss, and the fault."""

    def __init__(self, fault: str, width: int, blocks: int) -> None:
        super().__init__()
        self.fault = fault
        self.eaten: list[Any] = []
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block.forward(x) if self.fault == "bypass" else block(x)
        if self.fault == "overflow":
            x = Overflowing.apply(x)
        loss = (x @ self.embed.weight.T).float().logsumexp(-1).mean()
        if RANK == FAULTY_RANK:
            self.fail()
        if self.fault == "not_finite":
            return loss * float("nan")
        return {"loss": loss} if self.fault != "no_loss" else {"logits": x}

    def fail(self) -> None:
        if self.fault == "raise":
            raise ValueError("the model says no")
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "vanish":
            os._exit(0)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "memory":
            raise MemoryError
        if self.fault == "adjusted":
            raise ValueError(f"oom_score_adj is {Path('/proc/self/oom_score_adj').read_text()}")
        if self.fault == "eat":  # the host's memory, 30 MB at a time
            while True:
                self.eaten.append(bytearray(os.urandom(1024)) * 30_000)
                time.sleep(0.01)


def build(fault: str = "none", width: int = 64, blocks: int = 4) -> Any:
    """The factory."""
    if fault == "load" and RANK == FAULTY_RANK:
        raise OSError("cannot read the weights")

    def make_batch(sequences: int, seq_len: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(0, 256, (sequences, seq_len), device=device)}

    return Model(fault, width, blocks), make_batch
