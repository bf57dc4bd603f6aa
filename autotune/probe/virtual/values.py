"""The values of small integer tensors that follow from no data: positions, masks, lengths.

Models branch on them (is this mask all true?), and the answers are the same in every training. They are computed for
real, beside the tensors without data; everything that comes from the batch or from a float has no value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

LARGEST = 2**20
"""Elements of the largest tensor whose values are kept."""
_NO_VALUES = ("empty", "new_empty", "resize_", "set_")


class Values:
    """Keeps a real tensor beside a tensor without data, as its attribute `_value`, as long as it is known."""

    def of(self, tensor: Any) -> Tensor | None:
        """The values of a tensor, None where they are not known."""
        held = tensor.__dict__.get("_value")
        return held.tensor if held is not None and held.known[0] else None

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Do to the values what an operation did to the tensors."""
        target = args[0] if args and out is args[0] else None
        values = self.run(func, args, kwargs)
        if values is None:
            if target is not None and (held := target.__dict__.get("_value")):
                held.known[0] = False
            return
        if target is None:
            for part, value in zip(tree_iter(out), tree_iter(values), strict=True):
                if isinstance(part, Tensor):
                    part.__dict__["_value"] = _Held(value, [True])

    def view(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Make of the values the view that was made of the tensor."""
        held = args[0].__dict__.get("_value")
        if held is None or not held.known[0]:
            return
        views = func(held.tensor, *args[1:], **kwargs)
        for part, value in zip(tree_iter(out), tree_iter(views), strict=True):
            part.__dict__["_value"] = _Held(value, held.known)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The values of an operation's result, None where they do not follow from values that are known."""
        if unpredictable(func):
            return None
        unknown = False

        def value(arg: Any) -> Any:
            nonlocal unknown
            if isinstance(arg, torch.device):
                return torch.device("cpu")
            if not isinstance(arg, Tensor):
                return arg
            if type(arg) is Tensor:
                return arg
            known = self.of(arg)
            unknown |= known is None
            return known

        real = tree_map(value, (args, kwargs))
        return None if unknown else func(*real[0], **real[1])


class _Held:
    """Values, and whether they are still known: one flag for all views of them."""

    __slots__ = ("known", "tensor")

    def __init__(self, tensor: Tensor, known: list[bool]) -> None:
        self.tensor, self.known = tensor, known


def has_values(out: Any) -> bool:
    """Whether values of a result are worth keeping: small, and no floats."""
    tensors = [part for part in tree_iter(out) if isinstance(part, Tensor)]
    return bool(tensors) and all(
        not (t.dtype.is_floating_point or t.dtype.is_complex) and t.numel() <= LARGEST for t in tensors
    )


def unpredictable(func: Any) -> bool:
    """Whether a result's values do not follow from the arguments: random ones, and memory as it was."""
    name = func.name().removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_NO_VALUES) or func.namespace != "aten"
