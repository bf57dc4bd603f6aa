"""Writes what tensors do to a tape: a dispatch mode that sees every kernel and the birth and death of every storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from autotune.probe.virtual.roles import COMMUNICATION, PARAMETERS
from autotune.probe.virtual.scope import Scope
from autotune.probe.virtual.tape import Kind, Place, TapeWriter
from autotune.workload.phase import Phase

_NOT_KERNELS = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias"}
_NO_TRAFFIC = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


class OverBudget(Exception):
    """Raised when more is live on the device than it has: nothing that follows would change the verdict."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch types neither this class's making
    """Runs operations as they are, on real tensors, and writes them down.

    Args:
        writer: takes the events.
        scope: says which module an operation belongs to.

    Attributes:
        stream: says which stream is current.
        budget: bytes that may be live on the device; None for any number.
        live: bytes of storages alive on the device.
        escape: ends the process with an error that comes up inside of backward.
        host_is_device: host tensors count as the device's, as on an emulated device.
        on_phase: is told the index of each Phase that begins.
    """

    def __init__(self, writer: TapeWriter, scope: Scope) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor its __init__
        self.writer, self.scope = writer, scope
        self.stream: Callable[[], int] = lambda: 0
        self.scratch: Callable[[Any, Any, Any, Any], list[int]] | None = None  # see scratch.py; on real tensors, theirs
        self.budget: int | None = None
        self.escape: Callable[[Exception], Any] | None = None
        self.on_phase: Callable[[int], None] = lambda index: None
        self.live = 0
        self._storages: dict[int, tuple[int, int, int, weakref.ref[Any]]] = {}
        self._born_so_far = 0
        self._pinned: set[int] = set()
        self.host_is_device = False
        self._expected_on_host = 0
        self._silent = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped against torch's compiler, which takes longer than what is wrapped."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not is_view(func):
            flops, traffic = cost(func, args, kwargs or {}, out)
            self.write(func, args, out, flops, traffic)
        return out

    def write(self, func: Any, args: Any, out: Any, flops: int, traffic: int) -> None:
        """Write a kernel, then the storages that it made. Views are neither."""
        if self._silent:
            return
        writer, module, stream = self.writer, self.scope.module(), self.stream()
        op = writer.name(func.name())
        if func.namespace == "c10d":
            writer.rows.append((Kind.COLLECTIVE, 0, stream, op, module, *collective(args)))
            self._said_by_collective(func.name(), args)
        elif (crossing := _crossing(func, args, out)) is not None:
            writer.rows.append((Kind.COPY, 0, stream, op, module, *crossing))
        else:
            writer.rows.append((Kind.OP, _place(args, out), stream, op, module, flops, traffic))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self.born(value, op, module, stream)

    def born(self, tensor: torch.Tensor, op: int, module: int, stream: int) -> None:
        """Write a storage's birth where it is new; its death writes itself."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        kind = tensor.device.type
        size = 0 if kind == "meta" else storage.nbytes()
        known = self._storages.get(key)
        if known is not None:
            if known[1] == size:
                return
            self._died(key)  # resized: what it was is gone
        elif size == 0:
            return
        place = Place.DEVICE if kind not in ("cpu", "meta") or self.host_is_device else Place.HOST
        if self._expected_on_host and size == self._expected_on_host:
            place, self._expected_on_host = Place.HOST, 0
        self._born_so_far += 1
        ident = self._born_so_far
        dead = weakref.ref(storage, lambda _, key=key: self._died(key))  # type: ignore[misc] # mypy cannot infer it
        self._storages[key] = (ident, size, place, dead)
        self.writer.rows.append((Kind.ALLOC, place, stream, op, module, ident, size))
        if place == Place.DEVICE:
            self.live += size
            if self.budget is not None and self.live > self.budget:
                self.writer.stop()
                raise self.failing(OverBudget())

    def kernel(self, name: str, args: Any) -> None:
        """Write a kernel that no dispatcher sees: it reads and writes its tensors in place."""
        tensors = [value for value in tree_iter(args) if isinstance(value, torch.Tensor)]
        if tensors:
            place = _place(tensors, None)
            traffic = 2 * sum(nbytes(value) for value in tensors)
            self.writer.rows.append((Kind.OP, place, self.stream(), self.writer.name(name), 0, 0, traffic))

    def expect_host(self, size: int) -> None:
        """Where host and device are one memory: the next storage of this size belongs to the host."""
        self._expected_on_host = max(size, 0)

    def failing(self, error: Exception) -> Exception:
        """The error, to be raised; inside of backward `escape` is told instead, and does not return.

        There, an exception would pass through the device guards of the Python backend and end the process.
        """
        if self.escape is not None and torch._C._current_autograd_node() is not None:
            self.escape(error)
        return error

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Write nothing for a while. What is born meanwhile stays unknown to the tape."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def _said_by_collective(self, name: str, args: Any) -> None:
        """What is gathered from all ranks are parameters; what is reduced lies in a buffer that was made for it."""
        if "allgather" in name:
            taken, role = args[0], PARAMETERS
        elif "reduce" in name:
            taken, role = args[1] if "scatter" in name else args[0], COMMUNICATION
        else:
            return
        for tensor in tree_iter(taken):
            if isinstance(tensor, torch.Tensor):
                self.role(tensor, role)

    def role(self, tensor: torch.Tensor, role: str) -> None:
        """Say what a storage is to DeepSpeed; the first word counts."""
        if (ident := self.ident(tensor)) is not None:
            self.writer.roles.setdefault(ident, role)

    def temporaries(self, func: Any, sizes: list[int]) -> None:
        """Write storages on the device that are gone when the kernel that was written last ends."""
        rows, op, module, stream = self.writer.rows, self.writer.name(func.name()), self.scope.module(), self.stream()
        first = self._born_so_far + 1
        self._born_so_far += len(sizes)
        rows.extend((Kind.ALLOC, Place.DEVICE, stream, op, module, first + i, size) for i, size in enumerate(sizes))
        rows.extend((Kind.FREE, 0, stream, 0, 0, first + i, sizes[i]) for i in reversed(range(len(sizes))))

    def _died(self, key: int) -> None:
        ident, size, place, _ = self._storages.pop(key)
        self.live -= size if place == Place.DEVICE else 0
        self.writer.rows.append((Kind.FREE, 0, self.stream(), 0, 0, ident, size))

    def ident(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage on the tape; None for one that the tape has not seen."""
        return self.ident_of(tensor.untyped_storage())

    def ident_of(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage on the tape; None for one that the tape has not seen."""
        known = self._storages.get(storage._cdata)
        return known[0] if known else None

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a fresh host tensor is page-locked, and return it."""
        ident = self.ident(tensor)
        if ident is not None and (row := self.writer.rows[-1])[0] == Kind.ALLOC:
            self.writer.rows[-1] = (row[0], Place.PINNED, *row[2:])
            self._pinned.add(ident)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is page-locked."""
        return self.ident(tensor) in self._pinned

    def phase(self, name: str, micro_step: int, phase: Phase) -> None:
        """Write that a phase begins; `name` is the phase's, or that of the step in which it is not told apart."""
        index = list(Phase).index(phase)
        self.writer.rows.append((Kind.PHASE, 0, 0, self.writer.name(name), 0, micro_step, index))
        self.on_phase(index)

    def mark(self, kind: Kind, ident: int, stream: int) -> None:
        """Write something that streams, events or the allocator are told."""
        self.writer.rows.append((kind, 0, stream, 0, 0, ident, 0))


@cache
def is_view(func: Any) -> bool:
    """Whether an operation only makes another view of a storage: it runs nothing and allocates nothing."""
    name = func.name().partition(".")[0]
    if name == "aten::lift_fresh":  # where torch.tensor() comes out: a view by its schema, and a birth to us
        return False
    return bool(func.is_view) or name in _NOT_KERNELS or func.namespace == "prim"


def cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """(floating-point operations, bytes read and written) of one kernel, by torch's own formulas and its tensors."""
    if func.namespace != "aten":
        return 0, 0
    formula = flop_registry.get(func.overloadpacket)
    flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
    if func.name().partition(".")[0] in _NO_TRAFFIC:
        return flops, 0
    return flops, sum(nbytes(value) for value in (*tree_iter((args, kwargs)), *tree_iter(out)))


def nbytes(value: Any) -> int:
    """Bytes of a tensor's elements; an expanded dimension is read once."""
    if not isinstance(value, torch.Tensor):
        return 0
    size = value.element_size()
    for length, stride in zip(value.shape, value.stride(), strict=True):
        size *= length if stride else 1
    return size


def collective(args: Any) -> tuple[int, int]:
    """(ranks of the group, bytes of the whole message) of a c10d operation."""
    group, sizes = 1, [0]
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            if "ProcessGroup" in str(arg._type()):
                group = dist.ProcessGroup.unbox(arg).size()
        else:
            sizes.append(sum(nbytes(value) for value in tree_iter(arg)))
    return group, max(sizes)


def _place(args: Any, out: Any) -> int:
    """Where a kernel runs: where the first tensor lies that it makes or takes."""
    for value in tree_iter((out, args)):
        if isinstance(value, torch.Tensor):
            return Place.HOST if value.device.type == "cpu" else Place.DEVICE
    return Place.HOST


def _crossing(func: Any, args: Any, out: Any) -> tuple[int, int] | None:
    """(1 to the device or 0 to the host, bytes) of a copy between the two; None for every other operation."""
    name = func.name().partition(".")[0]
    if name == "aten::copy_":
        target, source = args[0], args[1]
    elif name == "aten::_to_copy":
        target, source = out, args[0]
    else:
        return None
    if (target.device.type == "cpu") == (source.device.type == "cpu"):
        return None
    return int(target.device.type != "cpu"), nbytes(target)
