"""Activation checkpointing that really happens: which blocks, which part of them, where the input waits.

DeepSpeed's own `activation_checkpointing` section does nothing unless the model calls it, so the blocks themselves
are made to recompute (torch.utils.checkpoint, non-reentrant), and `SavedBytes` checks that they did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

SHARES = {"none": 0.0, "quarter": 0.25, "half": 0.5, "all": 1.0}
PART_NAMES = {
    "attention": ("attention", "attn", "self_attention", "self_attn", "mixer"),
    "mlp": ("mlp", "feed_forward", "feedforward", "ffn", "block_sparse_moe", "moe", "experts"),
}
PARTS = ("whole", *PART_NAMES)


class CheckpointingError(Exception):
    """Raised when a model has nothing to checkpoint, or checkpointing had no effect."""


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The list of repeated blocks: the ModuleList or Sequential of two or more that holds most parameters.

    Returns:
        Its name in the model and its members in order.

    Raises:
        CheckpointingError: the model has none.
    """
    best: tuple[int, str, list[nn.Module]] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= 2:
            blocks = list(module.children())
            size = sum(_numel(block) for block in blocks)
            # An outer list of equal size is the one that repeats; deeper lists come later in named_modules().
            if len({type(block) for block in blocks}) <= len(blocks) // 2 and (best is None or size > best[0]):
                best = (size, name, blocks)
    if best is None or best[0] == 0:
        raise CheckpointingError(
            f"{type(model).__name__} has no list of repeated blocks (an nn.ModuleList or nn.Sequential of alike "
            "modules) to checkpoint"
        )
    return best[1], best[2]


def _numel(module: nn.Module) -> int:
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())


def choose_blocks(blocks: list[nn.Module], share: str) -> list[int]:
    """Which blocks of a list are checkpointed: the first of a uniform model, the largest first where blocks differ."""
    count = math.ceil(len(blocks) * SHARES[share])
    sizes = [_numel(block) for block in blocks]
    order = sorted(range(len(blocks)), key=lambda index: (-sizes[index], index))
    return sorted(order[:count])


def find_part(block: nn.Module, part: str) -> nn.Module:
    """The block itself (`whole`), its attention or its mlp.

    Raises:
        CheckpointingError: no child of the block goes by such a name.
    """
    if part == "whole":
        return block
    for name, child in block.named_children():
        if name.lower() in PART_NAMES[part]:
            return child
    children = ", ".join(name for name, _ in block.named_children()) or "none"
    raise CheckpointingError(f"a {type(block).__name__} has no part named like its {part} (its parts: {children})")


def find_targets(model: nn.Module, share: str, part: str) -> list[nn.Module]:
    """The modules that are to recompute; see `apply_checkpointing`."""
    _, blocks = find_blocks(model)
    return [find_part(blocks[index], part) for index in choose_blocks(blocks, share)]


def apply_checkpointing(model: nn.Module, share: str, part: str, where: str) -> list[nn.Module]:
    """Make the chosen blocks recompute in backward, and return the modules that do.

    Args:
        model: any module with a list of repeated blocks.
        share: `quarter`, `half` or `all` of the blocks.
        part: `whole`, `attention` or `mlp` of each.
        where: `device`, or `cpu` to move the saved input to the host until backward.

    Raises:
        CheckpointingError: the model has no block list, or its blocks no such part.
    """
    targets = find_targets(model, share, part)
    for target in targets:
        # A subclass made on the spot, because `module(...)` looks `__call__` up on the class: wrapping forward alone
        # would run the hooks of ZeRO-3, which fetch the module's own parameters, outside of the recomputation.
        kind = type(target)
        target.__class__ = type(kind.__name__, (_Checkpointed, kind), {"__module__": kind.__module__})
        object.__setattr__(target, "_autotune_input_to_host", where == "cpu")
    return targets


class _Checkpointed(nn.Module):
    """Mixed in before a module's own class: its call is recomputed in backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        watch = SavedBytes.active
        # Only the innermost hooks see a tensor: the host's are innermost, and tell the watch themselves.
        with (
            watch.watching(self, args) if watch else nullcontext(),
            HostInput.current() if self._autotune_input_to_host else nullcontext(),
        ):
            return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class HostInput(saved_tensors_hooks):
    """Keeps what checkpointing saves, the input of a block, in host memory until backward asks for it.

    Unlike torch's save_on_cpu it copies on a CPU too, where device and host are told apart by accounts:
    `ledger(bytes)` is called with what it moves to the host, and with the negative when that is given back.
    """

    ledger: Any = None

    def __init__(self, pin_memory: bool) -> None:
        def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor, _Held]:
            if SavedBytes.active is not None:
                SavedBytes.active.note(tensor)
            held = _Held(tensor.numel() * tensor.element_size())
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin_memory)
            return tensor.device, host.copy_(tensor, non_blocking=pin_memory), held

        def unpack(packed: tuple[torch.device, torch.Tensor, _Held]) -> torch.Tensor:
            device, host, _ = packed
            return torch.empty_like(host, device=device).copy_(host, non_blocking=pin_memory)

        super().__init__(pack, unpack)

    @classmethod
    def current(cls) -> HostInput:
        """Hooks for the accelerator here."""
        return cls(pin_memory=torch.cuda.is_available())


class _Held:
    """One tensor's bytes in the host's account, until nothing refers to it any more."""

    def __init__(self, size: int) -> None:
        self.size = size
        if HostInput.ledger is not None:
            HostInput.ledger(size)

    def __del__(self) -> None:
        if HostInput.ledger is not None:
            HostInput.ledger(-self.size)


class SavedBytes:
    """While active, counts what each checkpointed module saves for backward.

    A checkpointed block saves its input and nothing else; whatever more reaches these hooks would have been kept
    until backward.
    """

    active: SavedBytes | None = None

    def __init__(self, targets: list[nn.Module]) -> None:
        self.saved: dict[int, int] = {id(target): 0 for target in targets}
        self.inputs: dict[int, int] = {}
        self.names = {id(target): type(target).__name__ for target in targets}
        self._storages: dict[int, int] = {}

    def __enter__(self) -> SavedBytes:
        SavedBytes.active = self
        return self

    def __exit__(self, *exception: object) -> None:
        SavedBytes.active = None

    @contextmanager
    def watching(self, module: nn.Module, args: tuple[Any, ...]) -> Iterator[None]:
        """Count what is saved in this call of a module."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.note(tensor)
            return tensor

        self._storages = {}
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.saved[id(module)] = max(self.saved[id(module)], sum(self._storages.values()))
        self.inputs[id(module)] = sum(a.untyped_storage().nbytes() for a in args if isinstance(a, torch.Tensor))

    def note(self, tensor: torch.Tensor) -> None:
        """Count one saved tensor, each storage once; parameters are not activations."""
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()

    def check(self) -> None:
        """Say so when checkpointing did not do what it is for.

        Raises:
            CheckpointingError: a module was never called, or saved more than its input.
        """
        for key, name in self.names.items():
            if key not in self.inputs:
                raise CheckpointingError(
                    f"a {name} that should be checkpointed was never called as a module: "
                    "call block(x), not block.forward(x)"
                )
            if self.saved[key] > self.inputs[key]:
                raise CheckpointingError(
                    f"checkpointing a {name} had no effect: it saves {self.saved[key]:,} bytes for backward, "
                    f"its input has {self.inputs[key]:,}"
                )
