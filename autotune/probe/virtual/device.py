"""Devices that do not exist: a Python-only backend of torch, and DeepSpeed's accelerator on it.

Everything here changes torch for the whole process, so it runs in processes of its own.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import transformers.utils.import_utils
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch import nn
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from autotune.machine.machine import Machine
from autotune.probe.virtual import streams
from autotune.probe.virtual.recorder import Recorder
from autotune.probe.virtual.scratch import gpu_of, scratch
from autotune.probe.virtual.tape import Kind

DEVICE = "vgpu"


class _Backend(_DummyBackendModule):
    """What torch asks of a device module."""

    devices = 8
    current = 0

    def current_device(self) -> int:
        return self.current

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device_count(self) -> int:
        return self.devices


def adapt_torch() -> None:
    """Let modules hold tensors without data, on whatever device."""
    nn.Module._apply = _apply  # type: ignore[method-assign]
    # transformers builds general masks where it believes a graph is being traced: here every training is alike
    transformers.utils.import_utils.is_fake_tensor = lambda x: False


def register() -> None:
    """Make torch know the virtual device. Once per process."""
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Backend())
    # autograd starts a thread per device type, which dispatch modes do not reach
    torch.autograd.set_multithreading_enabled(False)
    # torch.tensor() fills a tensor below the modes: on the host, then, and copied from there as any other
    torch._C._set_only_lift_cpu_tensors(True)


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """nn.Module._apply without swap_tensors, which tensors that are watched by a weak reference refuse."""
    for child in self.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call] # torch types it not
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                moved = fn(parameter)
            if moved.device == parameter.device:
                parameter.data = moved
            else:  # which FakeTensors refuse
                self._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


class VirtualAccelerator(CUDA_Accelerator):  # type: ignore[misc] # DeepSpeed ships no types
    """DeepSpeed's CUDA accelerator, with every call that would reach a device answered here."""

    def __init__(self, machine: Machine, index: int, made: streams.Streams) -> None:
        super().__init__()
        self._name, self._machine, self._index, self._streams = DEVICE, machine, index, made

    # -- devices ------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """`vgpu`, or `vgpu:0`."""
        return DEVICE if device_index is None else f"{DEVICE}:{device_index}"

    def communication_backend_name(self) -> str:
        """The process group whose collectives return at once."""
        return "fake"

    def communication_backend_version(self) -> tuple[int, ...]:
        """NCCL's, on which DeepSpeed decides little."""
        return (2, 27, 3)

    def device(self, device_index: int | None = None) -> Any:
        """A context in which that device is current: always."""
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """A rank stays on its device."""

    def current_device(self) -> int:
        """This rank's."""
        return self._index

    def current_device_name(self) -> str:
        """Its name."""
        return f"{DEVICE}:{self._index}"

    def device_count(self) -> int:
        """Devices of a node."""
        return self._machine.devices_per_node

    def is_available(self) -> bool:
        """It is."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """The host waits for all streams."""
        self._streams.recorder.mark(Kind.SYNCHRONIZE, 1, 0)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.device.type == DEVICE

    # -- streams ------------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """Makes streams."""
        return lambda *args, **kwargs: streams.Stream(self._streams)

    @property
    def Event(self) -> Any:
        """Makes events."""
        return lambda *args, **kwargs: streams.Event(self._streams)

    def stream(self, stream: streams.Stream | None) -> Any:
        """A context in which that stream is current."""
        return self._streams.on(stream)

    def current_stream(self, device_index: int | None = None) -> streams.Stream:
        """The current one."""
        return self._streams.current

    def default_stream(self, device_index: int | None = None) -> streams.Stream:
        """The default one."""
        return self._streams.default

    # -- memory -------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """The allocator is told to give back what it caches."""
        self._streams.recorder.mark(Kind.EMPTY_CACHE, 0, self._streams.current.number)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Asked for in log lines only: the tape is replayed later."""
        return 0

    max_memory_allocated = reset_max_memory_allocated = memory_allocated
    memory_cached = max_memory_cached = reset_max_memory_cached = memory_allocated
    memory_reserved = max_memory_reserved = memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Nothing was ever retried."""
        return {"num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """There are none."""

    def total_memory(self, device_index: int | None = None) -> int:
        """Of one device, bytes."""
        return self._machine.device_memory_bytes

    def available_memory(self, device_index: int | None = None) -> int:
        """Of one device, bytes."""
        return self._machine.device_memory_bytes

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._streams.recorder.pinned(torch.empty_like(tensor)).copy_(tensor)

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return self._streams.recorder.pinned(tensor.new_empty(shape))

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._streams.recorder.is_pinned(tensor)

    # -- number formats, random numbers, names for profilers ----------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """By every device of the catalogue but V100, which has no peak rate for it."""
        return "bf16" in self._machine.peak_tflops

    def is_fp16_supported(self) -> bool:
        """By every device of the catalogue."""
        return True

    def is_triton_supported(self) -> bool:
        """Whatever is written in Triton has no place here."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """See is_triton_supported."""
        return False

    def _host_tensor(self, dtype: torch.dtype) -> Any:
        return lambda data: torch.tensor(data, dtype=dtype, device=self.current_device_name())

    BFloat16Tensor = property(lambda self: self._host_tensor(torch.bfloat16))
    ByteTensor = property(lambda self: self._host_tensor(torch.uint8))
    DoubleTensor = property(lambda self: self._host_tensor(torch.double))
    FloatTensor = property(lambda self: self._host_tensor(torch.float))
    HalfTensor = property(lambda self: self._host_tensor(torch.half))
    IntTensor = property(lambda self: self._host_tensor(torch.int))
    LongTensor = property(lambda self: self._host_tensor(torch.long))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Random numbers change no shape."""

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Random numbers change no shape."""
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        """Random numbers change no shape."""

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Random numbers change no shape."""
        return 0

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """No profiler watches."""

    def range_pop(self, domain: str | None = None) -> None:
        """No profiler watches."""

    def lazy_call(self, callback: Any) -> Any:
        """The device is always initialised."""
        return callback()


def use_virtual_device(rank: int, machine: Machine, recorder: Recorder) -> torch.device:
    """Give DeepSpeed the virtual accelerator, and return this rank's device."""
    index = rank % machine.devices_per_node
    _Backend.devices, _Backend.current = machine.devices_per_node, index
    set_accelerator(VirtualAccelerator(machine, index, streams.Streams(recorder)))
    recorder.scratch = partial(scratch, gpu=gpu_of(machine.device))
    return torch.device(DEVICE, index)
