"""A small custom model that does on request what users' own models do, in its second block; nobody runs it for real."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LENGTH = 64, 32


class FailingBackward(torch.autograd.Function):
    """The identity, with an error in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("the gradient says no")


class CuriousBackward(torch.autograd.Function):
    """The identity, whose backward asks for a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient if gradient.sum().item() > 0 else gradient * 2


class Deed(nn.Module):
    """Does one thing on the way forward."""

    def __init__(self, deed: str) -> None:
        super().__init__()
        self.deed = deed

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.size(1), device=x.device)
        match self.deed:
            case "branch":
                return x * 2 if x.sum() > 0 else x
            case "item":
                return x * x.detach().mean().item()
            case "list":
                return x * x.detach().mean((0, 2)).tolist()[0]
            case "numpy":
                return x * float(x.detach().float().mean().cpu().numpy())
            case "nonzero":
                return x + x.detach().abs().sum(-1).nonzero().size(0)
            case "select":
                return x + x[x > 0].sum()
            case "equal":
                return x if torch.equal(x, x * 2) else x * 2
            case "select_twice":  # the first is known, and the second of the same shape is not
                known = (positions >= 0).nonzero().size(0)
                return x + known + (x.detach()[0, :, 0] > 0).nonzero().size(0)
            case "positions":
                return self.by_position(x, positions)
            case "fail":
                raise ValueError("the model says no")
            case "fail_backward":
                return FailingBackward.apply(x)  # type: ignore[no-any-return]
            case "ask_backward":
                return CuriousBackward.apply(x)  # type: ignore[no-any-return]
            case "chat":
                print("a model that talks")
                print("on its way", flush=True)
            case "debug":
                breakpoint()
            case "exit":
                raise SystemExit("the model leaves")
            case "hang":
                time.sleep(600)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return x

    def by_position(self, x: Tensor, positions: Tensor) -> Tensor:
        """Branches that are the same in every training."""
        few, many = (positions < 4), (positions < 12)
        if not (positions >= 0).all() or torch.equal(few, many):
            raise AssertionError("positions are known")
        # shapes that follow from values: of two masks of one shape, and of a range whose step is no whole number
        shapes = [
            few.nonzero().size(0),
            many.nonzero().size(0),
            len(torch.arange(0.0, 5.0)),
            len(torch.arange(0.0, 9.0)),
        ]
        if shapes != [4, 12, 5, 9]:
            raise AssertionError(f"{shapes} is not what positions say")
        return x


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, deed: str) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.deed = Deed(deed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.deed(self.mlp(x))


class Model(nn.Module):
    """Token embedding, blocks, and a loss."""

    def __init__(self, deed: str, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, deed if index == 1 else "") for index in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (x @ self.embed.weight.T).float().logsumexp(-1).mean()


def build(deed: str = "", width: int = WIDTH, blocks: int = 3) -> Any:
    """The factory."""
    if deed == "kill_load" and torch.get_default_device().type != "meta":
        os.kill(os.getpid(), signal.SIGKILL)

    def make_batch(sequences: int, seq_len: int, device: torch.device) -> dict[str, Tensor]:
        return {"tokens": torch.randint(0, 256, (sequences, seq_len), device=device)}

    return Model(deed, width, blocks), make_batch


def uneven(width: int = WIDTH) -> Any:
    """A model whose parameters differ much in size, so that ranks of stages 1 and 2 keep different gradients."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (width, 8 * width, width // 2, 3 * width, 16 * width, width)
            self.embed = nn.Embedding(256, width)
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.float().mean()

    return Uneven(), build()[1]
