"""Runs operations on tensors that have no data, quickly: torch's FakeTensors, with what was learnt once remembered.

FakeTensorMode answers every operation it is asked, at about 0.2 ms each; an optimizer step of a large model asks a
hundred thousand times, mostly the same. Shapes in decide shapes out, so answers are kept by the shapes that went in.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from autotune.probe.virtual.recorder import Recorder, cost, is_view
from autotune.probe.virtual.scope import Scope
from autotune.probe.virtual.tape import TapeWriter
from autotune.probe.virtual.values import Values, has_values

_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_SET_DATA = {"aten::set_", "aten::resize_", "aten::lift_fresh"}
_FROM_FLOATS = {"aten::arange", "aten::range"}  # floats decide the shape
_PLAIN = (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotTraceable(Exception):
    """Raised when a model asks for the values of tensors, of which there are none."""


class VirtualRecorder(Recorder):  # type: ignore[no-untyped-call] # torch types it not
    """Records operations on tensors without data.

    Args:
        writer, scope: see Recorder.
    """

    def __init__(self, writer: TapeWriter, scope: Scope) -> None:
        super().__init__(writer, scope)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = Values()
        self.meta = _MetaKernels(self.fake)
        self._answers: dict[Any, _Answer | None] = {}
        self._templates: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else torch.device("cpu")
        kwargs = kwargs or {}
        if is_view(func):
            return self._view(func, args, kwargs)
        if func is _ITEM:
            return self._item(args[0])
        if func is _ADD and self.scratch is not None and _accumulates(args, sys._getframe(1)):
            func = _ADD_IN_PLACE
        if kwargs.get("pin_memory"):  # there is nothing here to pin memory for: the tape is told
            return self.pinned(self.__torch_dispatch__(func, types, args, kwargs | {"pin_memory": None}))
        key = _key(func, args, kwargs)
        answer = self._answers.get(key) if key is not None else None
        if answer is not None:
            out = answer.give(self, args, kwargs)
            if answer.valued:
                self.values.follow(func, args, kwargs, out)
            self.write(func, args, out, answer.flops, answer.traffic)
            if answer.temporaries:
                self.temporaries(func, answer.temporaries)
            return out
        out = self._ask(func, args, kwargs)
        valued = has_values(out)
        if valued:
            self.values.follow(func, args, kwargs, out)
        flops, traffic = cost(func, args, kwargs, out)
        temporaries = self.scratch(func, args, kwargs, out) if self.scratch else []
        if key is not None:
            self._answers[key] = _Answer.learn((args, kwargs), out, flops, traffic, valued, temporaries)
        self.write(func, args, out, flops, traffic)
        if temporaries:
            self.temporaries(func, temporaries)
        return out

    def wrap(self, elem: Tensor, device: torch.device) -> Tensor:
        """The FakeTensor of a meta tensor on a device, as FakeTensor's own constructor would make it."""
        tensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        template = self._templates.get(device)
        if template is None:
            with _disable_current_modes():
                model = FakeTensor(self.fake, torch.empty((), device="meta"), device)
            template = self._templates[device] = dict(model.__dict__)
        tensor.__dict__.update(template)
        return tensor

    def slice_quickly(self) -> None:
        """Have plain slices skip torch's dispatcher: ZeRO cuts every parameter into as many as there are ranks.

        Slicing allocates nothing, so nothing is missed; what autograd follows goes the usual way.
        """
        narrow, getitem = Tensor.narrow, Tensor.__getitem__

        def quick(tensor: Any) -> bool:
            known = tensor.__dict__
            unfollowed = not (tensor.requires_grad and torch.is_grad_enabled())
            return unfollowed and known["constant"] is None and "_value" not in known

        def quick_narrow(tensor: Any, dim: int, start: Any, length: Any) -> Tensor:
            if not quick(tensor):
                return narrow(tensor, dim, start, length)
            with self.meta:
                elem = narrow(tensor, dim, start, length)
            return self.wrap(elem, tensor._fake_device)

        def quick_getitem(tensor: Any, key: Any) -> Tensor:
            if type(key) is not slice or not quick(tensor):
                return getitem(tensor, key)
            with self.meta:
                elem = getitem(tensor, key)
            return self.wrap(elem, tensor._fake_device)

        FakeTensor.narrow = quick_narrow  # type: ignore[assignment]
        FakeTensor.__getitem__ = quick_getitem  # type: ignore[method-assign]

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        base = args[0]
        if type(base) is not FakeTensor or base.constant is not None:
            return self._ask(func, args, kwargs)
        device = base._fake_device
        with self.meta:
            out = func(*args, **kwargs)
            out = self.wrap(out, device) if isinstance(out, Tensor) else [self.wrap(part, device) for part in out]
        if self.scope.inside:
            self.scope.module()  # its backward is the module's, too
        if "_value" in base.__dict__:
            self.values.view(func, args, kwargs, out)
        return out

    def _item(self, tensor: Tensor) -> Any:
        known: Tensor | None = tensor
        if type(tensor) is FakeTensor:
            known = tensor.constant if tensor.constant is not None else self.values.of(tensor)
        if known is not None:
            value = torch.ops.aten._local_scalar_dense.default(known)
        elif self.scope.inside or _in_custom_backward():
            raise self.untraceable("aten::_local_scalar_dense", "the value of a tensor, as in .item() or if tensor:")
        else:
            # Zero is the answer on which DeepSpeed takes the step: no overflow, no norm to clip.
            value = False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0
        self.write(_ITEM, (tensor,), None, 0, 0)
        return value

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            # A small tensor on the host has a value; FakeTensorMode would move it to the device for real.
            for tensor in tree_iter(args):
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None
        try:
            with self.fake:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            real = self.values.run(func, args, kwargs)
            if real is None:
                raise self.untraceable(func.name(), "its result depends on the values of tensors") from error
            if not isinstance(real, Tensor):
                return real
            with self.fake:
                return torch.empty(real.shape, dtype=real.dtype, device=args[0].device)
        except UnsupportedOperatorException as error:
            raise self.untraceable(func.name(), "torch does not know the shape of its result") from error
        except (RuntimeError, TypeError, ValueError) as error:
            raise self.failing(error) from error

    def untraceable(self, operation: str, why: str) -> Exception:
        """The error that says so, to be raised."""
        module = self.writer.text(self.scope.module())
        return self.failing(NotTraceable(f"{operation} in {module or 'the model'} ({why})"))


_READS = (
    (".numpy()", re.compile(r"\.numpy\(\) is not supported")),
    ("a kernel of its own", re.compile(r"[Cc]annot access (the )?data pointer")),
    ("a copy of its data", re.compile(r"Cannot copy out of meta tensor")),
)


def reads_memory(error: Exception) -> str | None:
    """What has tried to read the memory of a tensor, where it is that which torch complains of."""
    return next((what for what, pattern in _READS if pattern.search(str(error))), None)


def _in_custom_backward() -> bool:
    """Whether the backward of a model's own autograd.Function runs."""
    function = getattr(torch._C._current_autograd_node(), "_forward_cls", None)
    return function is not None and not function.__module__.startswith(("torch.", "deepspeed."))


def _accumulates(args: Any, caller: FrameType) -> bool:
    """Whether autograd adds two gradients of one tensor, and would do so in place if no dispatch mode watched.

    See accumulate and can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp: the first one's storage must be
    nobody else's. Under any mode (isTensorSubclassLike) a new tensor is made instead, of the size of an activation.
    """
    if torch.is_grad_enabled() or caller.f_code.co_name != "_engine_run_backward":
        return False
    first, second = args[:2]
    if type(first) is not FakeTensor or type(second) is not FakeTensor or first.shape != second.shape:
        return False
    storage = first.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor and `storage`
    return alone and storage.nbytes() == first.numel() * first.itemsize  # no gaps, nothing expanded


class _MetaKernels:
    """FakeTensorMode's own way to the meta kernels (in_kernel_invocation_manager), without its cost of a generator."""

    __slots__ = ("_dispatch", "_fake", "_keys")

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake

    def __enter__(self) -> None:
        # Made anew each time: some of torch's guards hold from when they are made
        self._dispatch, self._keys = torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard()
        self._dispatch.__enter__()  # type: ignore[no-untyped-call] # torch types neither
        self._keys.__enter__()  # type: ignore[no-untyped-call]
        self._fake.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)

    def __exit__(self, *error: object) -> None:
        self._fake.in_kernel_invocation = False
        self._keys.__exit__(*error)
        self._dispatch.__exit__(*error)


class _Answer:
    """What an operation made of inputs of certain shapes: inputs themselves, or new tensors."""

    __slots__ = ("flops", "parts", "shape", "temporaries", "traffic", "valued")

    def __init__(
        self, shape: type | None, parts: list[Any], flops: int, traffic: int, valued: bool, temporaries: list[int]
    ) -> None:
        self.shape, self.parts, self.flops, self.traffic, self.valued = shape, parts, flops, traffic, valued
        self.temporaries = temporaries

    @classmethod
    def learn(
        cls, inputs: Any, out: Any, flops: int, traffic: int, valued: bool, temporaries: list[int]
    ) -> _Answer | None:
        """The answer that `out` is, None where it cannot be given again by shape alone."""
        shape = None if isinstance(out, Tensor) or out is None else type(out)
        if shape not in (None, tuple, list):
            return None
        known = [value for value in tree_iter(inputs) if isinstance(value, Tensor)]
        storages = {value.untyped_storage()._cdata for value in known}
        parts: list[Any] = []
        for part in (out,) if shape is None else out:
            same = next((index for index, value in enumerate(known) if value is part), None)
            if part is None or same is not None:
                parts.append(same)
                continue
            if type(part) is int:
                parts.append([part])
                continue
            if type(part) is not FakeTensor or part.constant is not None or part.storage_offset():
                return None
            whole = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True)) + 1 if part.numel() else 0
            if part.untyped_storage()._cdata in storages or part.untyped_storage().nbytes() != whole * part.itemsize:
                return None
            parts.append((tuple(part.shape), part.stride(), part.dtype, part._fake_device))
        return cls(shape, parts, flops, traffic, valued, temporaries)

    def give(self, recorder: VirtualRecorder, args: Any, kwargs: Any) -> Any:
        """The same answer for other inputs of those shapes."""
        made: list[Any] = []
        inputs: list[Any] | None = None
        for part in self.parts:
            if type(part) is tuple:
                size, stride, dtype, device = part
                with recorder.meta:
                    elem = torch.empty_strided(size, stride, dtype=dtype, device="meta")
                made.append(recorder.wrap(elem, device))
            elif part is None:
                made.append(None)
            elif type(part) is list:
                made.append(part[0])
            else:
                if inputs is None:
                    inputs = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
                made.append(inputs[part])
        return made[0] if self.shape is None else self.shape(made)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What decides the shapes of a result; None where more than shapes does."""
    if _beyond_shapes(func):
        return None
    parts: list[Any] = [func]
    if not _sign(args, parts):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _sign((value,), parts):
            return None
    return tuple(parts)


@cache
def _beyond_shapes(func: Any) -> bool:
    """Whether values decide the shape of a result, or memory that is no argument."""
    name = func.name().partition(".")[0]
    by_value = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    return func.namespace == "c10d" or name in _SET_DATA or name in _FROM_FLOATS or by_value


def _sign(values: Any, parts: list[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            parts.append((value.shape, value.stride(), value.dtype, value._fake_device))
        elif kind is tuple or kind is list or kind is torch.Size:
            parts.append(len(value))
            if not _sign(value, parts):
                return False
        elif kind is float or kind is bool:
            parts.append(kind)  # the value of a float changes no shape; that of a flag may
            if kind is bool:
                parts.append(value)
        elif isinstance(value, _PLAIN):
            parts.append(value)
        elif kind is torch.Generator:
            parts.append(kind)
        else:
            return False
    return True
