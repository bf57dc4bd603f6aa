"""Memory meters of one rank: per phase of the untimed steps, on an emulated device (CPU) or on a real one (CUDA).

A meter record of one phase has, in bytes where not said otherwise:

    allocated         live tensors on the device at the worst moment of the phase
    live              live tensors on the device at the phase's end
    reserved          what the allocator held then (on a CPU nothing caches: equal to allocated)
    device_total      all that the device had in use at the phase's end (CUDA only)
    inactive_split    free parts of split blocks, the fragmentation that cannot be given back (CUDA only)
    retries, ooms     counts of the allocator's cache flushes and failed requests so far (CUDA only)
    host              bytes that belong to the host: offloaded states and parameters, saved inputs
    pss               resident memory of this process, shared pages shared out
    pinned            host memory that torch has from the driver, which is in nobody's resident memory (CUDA only)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from autotune.probe.torchrun.limit import NEAR, DeviceLimit, return_freed_memory
from autotune.probe.torchrun.procfs import heap_bytes, pss_bytes
from autotune.probe.torchrun.tape import Tape
from autotune.workload.checkpointing import HostInput


class Meters(Protocol):
    """Reads the device's memory as phases of the untimed part go by."""

    failed_at: int

    def full(self, requested: int) -> bool:
        """After a failure: whether so many bytes more were too many.

        `failed_at` then says what was in use, bytes; 0 where that is not known.
        """
        ...

    def taping(self) -> AbstractContextManager[Any]:
        """While entered, memory is tracked."""
        ...

    def begin(self) -> None:
        """A phase begins: peaks start from what is live now."""
        ...

    def read(self) -> dict[str, int]:
        """The record of the phase since `begin`."""
        ...

    def settle(self, engine: Any) -> None:
        """The engine exists or has made a first step: find out anew what belongs to the host."""
        ...

    def release(self) -> None:
        """What follows is timed, and repeats what has fitted: nothing of the metering may slow it."""
        ...

    def after_step(self) -> dict[str, int]:
        """What is in use after a measured step, for a look at what grows; takes microseconds.

        `device`: live tensors on the device; on CUDA also `reserved`, and `retries` so far, of its allocator. `host`:
        what the process has from malloc, pinned memory included. On an emulated device both are one heap: `device`.
        """
        ...


class CpuMeters:
    """The tape's exact account on an emulated device, with the kernel enforcing the budget."""

    def __init__(self, budget: int, host_to_come: int) -> None:
        self.limit = DeviceLimit(budget)
        self.failed_at = 0
        self.tape = Tape(before=lambda live: self.limit.allow(live, self._to_come), after=self.limit.lift)
        self._taping = True
        self._to_come = host_to_come
        self._host = 0
        HostInput.ledger = self._move

    def full(self, requested: int) -> bool:
        """See Meters."""
        self.failed_at = self.tape.live_at_failure
        return self.failed_at + requested >= (1 - NEAR) * (self.limit.budget + self._to_come)

    def taping(self) -> AbstractContextManager[Any]:
        """See Meters."""
        return self.tape

    def begin(self) -> None:
        """See Meters."""
        self.tape.reset_peak()

    def read(self) -> dict[str, int]:
        """See Meters. Without the tape nothing is known of the device."""
        if not self._taping:
            return {"pss": pss_bytes()}
        peak, live = self.tape.peak, self.tape.live
        return {"allocated": peak, "reserved": peak, "live": live, "host": self._host, "pss": pss_bytes()}

    def settle(self, engine: Any) -> None:
        """See Meters. Corrects the phase that is just ending, in which the host's tensors were born unmarked."""
        owned = sum(storage.nbytes() for storage in host_storages(engine))
        moved = owned - self._host
        self.tape.live -= moved
        self.tape.peak = max(self.tape.peak - moved, self.tape.live)
        if moved and engine.global_steps == 0:
            # Initialising made temporaries on the host too, which nothing tells from the device's.
            self.tape.peak = self.tape.live
        self._host = owned
        # The optimizer's states are born in the first step; after it nothing is still to come.
        self._to_come = max(self._to_come - moved, 0) if engine.global_steps == 0 else 0

    def release(self) -> None:
        """See Meters."""
        self._taping = False
        return_freed_memory(at_once=False)

    def after_step(self) -> dict[str, int]:
        """See Meters."""
        return {"device": heap_bytes()}

    def _move(self, size: int) -> None:
        self._host += size
        self.tape.live -= size


class CudaMeters:
    """The caching allocator's own statistics."""

    def __init__(self, budget: int) -> None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        # Also where it changes nothing: the allocator's garbage collection works only with a fraction set.
        torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0))
        self.failed_at = 0

    def full(self, requested: int) -> bool:
        """See Meters. The allocator's own exception says that it was."""
        self.failed_at = torch.cuda.memory_allocated()
        return True

    def taping(self) -> AbstractContextManager[Any]:
        """See Meters."""
        return nullcontext()

    def begin(self) -> None:
        """See Meters."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, int]:
        """See Meters."""
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": stats["allocated_bytes.all.peak"],
            "live": stats["allocated_bytes.all.current"],
            "reserved": stats["reserved_bytes.all.peak"],
            "device_total": total - free,
            "inactive_split": stats["inactive_split_bytes.all.peak"],
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
            "pinned": _pinned_bytes(),
            "pss": pss_bytes(),
        }

    def settle(self, engine: Any) -> None:
        """See Meters. Device and host are different memories here: nothing to tell apart."""

    def release(self) -> None:
        """See Meters. The allocator's statistics cost nothing."""

    def after_step(self) -> dict[str, int]:
        """See Meters."""
        stats = torch.cuda.memory_stats()
        return {
            "device": stats["allocated_bytes.all.current"],
            "reserved": stats["reserved_bytes.all.current"],
            "retries": stats["num_alloc_retries"],
            "host": heap_bytes() + _pinned_bytes(),
        }


def _pinned_bytes() -> int:
    """What torch has of pinned host memory; 0 where this torch does not say."""
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return int(stats.get("allocated_bytes.current", 0))


def host_storages(engine: Any) -> list[torch.UntypedStorage]:
    """The storages of an engine that offloading puts into host memory, each once.

    On an emulated device nothing in a tensor tells host from device; these are the buffers that DeepSpeed 0.19
    creates on "cpu" when it offloads (stage_1_and_2.py and stage3.py).
    """
    zero = engine.zero_offload_optimizer()
    found: dict[int, torch.UntypedStorage] = {}
    tensors: list[Any] = []
    optimizer = engine.optimizer
    if zero is not None and zero.device == "cpu":
        for name in _OPTIMIZER_ON_HOST:
            tensors.append(getattr(optimizer, name, None))
        tensors.append(list(optimizer.optimizer.state.values()))
    param = engine.zero_offload_param()
    if param is not None and param.device == "cpu":
        tensors.append(getattr(optimizer, "param_groups_fp16_flat_cpu_memory", None))
        tensors.append([getattr(p, "ds_tensor", None) for p in engine.module.parameters()])
    for tensor in _tensors(tensors):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return list(found.values())


_OPTIMIZER_ON_HOST = (
    # stages 1 and 2
    "single_partition_of_fp32_groups",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "accumulated_grads_in_cpu",
    # stage 3
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        if value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
