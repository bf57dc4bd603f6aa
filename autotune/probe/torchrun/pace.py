"""A small fixed piece of work that every rank does at the same time, without the others: how fast its device is now."""

from __future__ import annotations

import time

import torch

ROUNDS = 19
"""Each round is timed: a device that is slow is slow in all of them, a disturbance is in one or two."""
_CPU = (256, 6, torch.float32)  # size of the square matrices, products per round, number format
_CUDA = (2048, 100, torch.float16)
"""A few milliseconds a round, by rates between 30 Gflop/s (one core) and 1 Pflop/s; matrices of 0.3 and of 8 MB, so
that there is room for them on a device that is nearly full."""


def pace(device: torch.device) -> list[float]:
    """Seconds of each round of the work; empty where the device has no room for it.

    Args:
        device: of this rank. Nothing else may be going on on it.
    """
    size, products, dtype = _CPU if device.type == "cpu" else _CUDA
    try:
        with torch.no_grad():
            factor = torch.full((size, size), 1 / size, device=device, dtype=dtype)
            value, product = torch.ones_like(factor), torch.empty_like(factor)
            rounds = []
            for _ in range(ROUNDS + 1):
                _wait(device)
                began = time.perf_counter()
                for _ in range(products):
                    torch.mm(factor, value, out=product)
                _wait(device)
                rounds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return []
    return rounds[1:]  # the first one loads what the library needs


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize()
