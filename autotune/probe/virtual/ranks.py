"""Which ranks may need the most memory: below stage 3 they keep different gradients, and not equally many."""

from __future__ import annotations

from itertools import accumulate

EVERY = 4
"""Worlds up to so many ranks are looked at whole."""


def suspects(sizes: list[int], world: int, zero_stage: int) -> list[int]:
    """Ranks of which one needs the most memory.

    ZeRO-1 and 2 give each rank an equal part of the flattened parameters, and a rank keeps the whole gradient of every
    parameter that its part touches, from when backward makes it. The last ranks' come first, while activations are
    still there; and some ranks' parts touch most.

    Args:
        sizes: elements of the parameters, in the model's order.
        world: ranks.
        zero_stage: of ZeRO.
    """
    if zero_stage not in (1, 2) or world == 1:
        return [0]
    if world <= EVERY:
        return list(range(world))
    touched = [0] * world
    part = -(-sum(sizes) // world)
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        for rank in range((end - size) // part, min((end - 1) // part, world - 1) + 1):
            touched[rank] += size
    most = sorted(range(world), key=lambda rank: (touched[rank], rank))[-2:]
    return sorted({*most, world - 2, world - 1})
