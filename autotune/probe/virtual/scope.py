"""Which module of the model an operation belongs to, in forward, in backward and while it is recomputed."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autotune.probe.virtual.tape import TapeWriter


class Scope:
    """Follows the calls of modules by hooks, and their backward by the numbers that autograd gives its nodes.

    Args:
        writer: keeps the names.
    """

    def __init__(self, writer: TapeWriter) -> None:
        self._writer = writer
        self._names: dict[int, int] = {}
        self._stack: list[int] = []
        self._by_node: dict[int, int] = {}
        self._handles: list[Any] = []

    def follow(self, model: nn.Module) -> None:
        """Learn the names of a model's modules and watch their calls from here on."""
        self._names = {id(module): self._writer.name(name) for name, module in model.named_modules()}
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def module(self) -> int:
        """The index of the name of the module at work, 0 for none."""
        if self._stack:
            if torch.is_grad_enabled():
                # autograd has numbered the node of this operation by now, one below the next number
                self._by_node[torch.autograd._get_sequence_nr() - 1] = self._stack[-1]  # type: ignore[attr-defined]
            else:  # perhaps inside of a custom autograd.Function, whose node is numbered before it runs
                self._by_node.setdefault(torch.autograd._get_sequence_nr() - 1, self._stack[-1])  # type: ignore[attr-defined]
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        return self._by_node.get(node._sequence_nr(), 0) if node is not None else 0

    @property
    def inside(self) -> bool:
        """Whether a module of the model is being called."""
        return bool(self._stack)

    def where(self, error: BaseException) -> int:
        """The index of the name of the innermost module of the model that an error came through, 0 for none."""
        found = 0
        for frame, _ in traceback.walk_tb(error.__traceback__):
            found = self._names.get(id(frame.f_locals.get("self")), found)
        return found

    def forget(self) -> None:
        """A step is over: its graph is gone."""
        self._by_node.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and self._stack:
            self._stack.pop()
