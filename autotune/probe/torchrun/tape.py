"""Live and peak bytes of every tensor storage on a CPU, exactly, from their birth and death."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch types neither this class's making
    """Counts storages while it is active; what was born before is not known to it.

    Bytes are those asked for, without an allocator's rounding. Deaths are counted whether or not the tape is active.

    Args:
        before: called with `live` before every operation that is no collective.
        after: called after every operation.

    Attributes:
        live: bytes of the storages alive now.
        peak: the most that were alive since `reset_peak`.
        live_at_failure: `live` when an operation last raised.
    """

    def __init__(
        self, before: Callable[[int], None] = lambda live: None, after: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor its __init__
        self._before, self._after = before, after
        self.live = 0
        self.peak = 0
        self.live_at_failure = 0
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Begin a new phase: the peak is what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":  # collectives make no tensors, but buffers and threads of their own
            self._before(self.live)
        try:
            out = func(*args, **(kwargs or {}))
        except (RuntimeError, MemoryError):
            # What is alive now: unwinding frees some of it before anyone else can look.
            self.live_at_failure = self.live
            raise
        finally:
            self._after()
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._born(value)
        return out

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = 0 if tensor.device.type == "meta" else storage.nbytes()
        before = self._sizes.get(key)
        if size == before or (before is None and size == 0):
            return
        if before is None:
            weakref.finalize(storage, self._died, key).atexit = False
        self._sizes[key] = size  # a known storage may have been resized
        self.live += size - (before or 0)
        self.peak = max(self.peak, self.live)

    def _died(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
