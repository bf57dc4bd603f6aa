"""Makes the tape of a deep model from the tapes of two shallow ones, which differ by one period of identical blocks.

A tape is a text with loops: what the deeper tape has more of is one copy in every loop over blocks or parameters
(building, forward, backward, the optimizer's step). Everything else is in both, except for its numbers: storages,
events, names, and sizes of what holds the whole model. Of n copies that are inserted, copy j has a + b·n + c·j as such
a number, because storages, events and names are numbered as they come, and every copy makes equally many. The two
tapes give b and neighbouring copies c; where they do not agree, the structure does not repeat and nothing is said.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.probe.virtual.depth_loops import Loop, loops
from autotune.probe.virtual.depth_text import MODULE, Ints, Names, NotExtendable, Text
from autotune.probe.virtual.headroom import DRIFT, HEADROOM
from autotune.probe.virtual.tape import Kind, Tape

__all__ = ["NEVER", "NotExtendable", "extend", "least_depth"]

NEVER = 1 << 40
"""More blocks than any model has."""

_DEFAULT_LIMIT, _DEFAULT_BUCKET = 1_000_000_000, 500_000_000  # of stage 3, in elements
_ALLREDUCE_BUCKET = 500_000_000  # elements that are reduced at a time at stage 0: MEMORY_OPT_ALLREDUCE_SIZE


def extend(shallow: Tape, deeper: Tape, copies: int, blocks: str) -> Tape:
    """The tape of a model with `copies` more periods of blocks than `deeper`.

    Args:
        shallow: of a model with d blocks, at least `least_depth`.
        deeper: of the same with d + p blocks; p blocks are a period: 1 where all are treated alike.
        copies: how many periods to add to `deeper`.
        blocks: the name of the list of blocks in the model, as in "gpt_neox.layers".

    Raises:
        NotExtendable: the two do not show how it goes on.
    """
    names = Names(shallow.names, deeper.names, blocks)
    first, second = Text(shallow, names), Text(deeper, names)
    found = list(loops(first, second))
    source, values = _numbers(first, second, found, copies)
    listed = names.extended(copies)
    rows = deeper.rows[source]
    rows["op"] = names.moved(rows["op"], copies)
    rows["ident"], rows["size"], rows["module"] = values.T
    _check(rows)
    module = values[:, MODULE]
    known = module.min() >= 0 and module.max() < len(listed)
    if not known or not np.array_equal(names.templates(listed)[module], second.template[source]):
        raise NotExtendable("modules are not named alike in all blocks")
    roles = second.role[source]
    said = {int(rows["ident"][at]): second.roles[roles[at]] for at in np.flatnonzero(roles)}
    return Tape(rows, listed, said, _facts(shallow.facts, deeper.facts, copies))


def least_depth(block_parameters: int, period: int, config: dict[str, Any], parameters: int = 0, ranks: int = 1) -> int:
    """How many blocks the shallow tape needs at least, so that `extend` finds what repeats.

    At stage 3, blocks near the beginning and the end of a pass differ from those between: as far as DeepSpeed fetches
    ahead and keeps parameters for another use. `stage3_max_live_parameters` and `stage3_max_reuse_distance` limit
    both; with a limit of 2.2 blocks, backward has so many such blocks that 7 are enough, with 3.3 blocks 12, with 4.6
    blocks 16. Where the blocks of a period are not treated alike, each sort of them needs that, less one. `extend`
    refuses what is too shallow.

    What happens less than once in a period, such as a full bucket or a new group of parameters, is not in two shallow
    tapes: there is no depth then.

    Args:
        block_parameters: elements of one block.
        period: blocks that the two tapes differ by.
        config: DeepSpeed's, of the deep model.
        parameters: elements of the whole deep model; 0 where that is not known.
        ranks: over which they are partitioned.

    Returns:
        A number of blocks, `NEVER` for none that is enough.
    """
    zero = config["zero_optimization"]
    elements = block_parameters * period
    if zero["stage"] != 3:
        alike = 0 < parameters <= _ALLREDUCE_BUCKET or elements > _ALLREDUCE_BUCKET
        return 6 * period if zero["stage"] == 0 and alike else NEVER
    if zero.get("reduce_bucket_size", _DEFAULT_BUCKET) >= 1.5 * elements:  # the parameter that no longer fits counts
        return NEVER
    if parameters / ranks > 0.99 * zero.get("sub_group_size", _DEFAULT_LIMIT):  # partitions are padded
        return NEVER
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    reach = max(float(zero.get(name, _DEFAULT_LIMIT)) for name in limits) / block_parameters
    least = max(4 * math.ceil(reach) - 4, 6)
    return least if period == 1 else period * (least - 1)


def _numbers(first: Text, second: Text, found: list[Loop], copies: int) -> tuple[Ints, Ints]:
    """(the row of the second text that each row of the result is like, its numbers)."""
    total = len(second.strict)
    inserted = np.zeros(total, dtype=bool)
    for loop in found:
        inserted[loop.start : loop.end] = True
    if total - np.count_nonzero(inserted) != len(first.strict):
        raise NotExtendable("the deeper tape has not as many rows more as its loops have")
    more = np.empty_like(second.values)  # of each number, with one period more
    more[~inserted] = second.values[~inserted] - first.values
    if np.any(more[~inserted] < 0):
        raise NotExtendable("something has a smaller number or size where the model is deeper")
    step = np.zeros_like(second.values)  # from copy to copy
    source, copy = [], []
    at = 0
    for loop in found:
        this, last = slice(loop.start, loop.end), slice(loop.start - loop.one, loop.start)
        growth = second.values[loop.start : loop.start + loop.one] - second.values[last]
        more[this] = np.resize(more[last], more[this].shape)
        step[this] = np.resize(growth * (loop.length // loop.one), step[this].shape)
        source += [np.arange(at, loop.start), np.tile(np.arange(loop.start, loop.end), copies + 1)]
        copy += [np.zeros(loop.start - at, dtype=np.int64), np.repeat(np.arange(copies + 1), loop.length)]
        at = loop.end
    source.append(np.arange(at, total))
    copy.append(np.zeros(total - at, dtype=np.int64))
    rows, copied = np.concatenate(source), np.concatenate(copy)[:, None]
    return rows, second.values[rows] + copies * more[rows] + copied * step[rows]


def _facts(shallow: dict[str, Any], deeper: dict[str, Any], copies: int) -> dict[str, Any]:
    """What is known of the deeper run: as in both, or counted on."""
    if shallow.keys() != deeper.keys() or deeper.get("cut"):
        raise NotExtendable("the tapes say different things of their runs, or are not whole")
    facts = {name: _counted(name, shallow[name], more, copies) for name, more in deeper.items() if name != HEADROOM}
    if HEADROOM in deeper:
        facts[HEADROOM] = deeper[HEADROOM] - copies * (deeper[DRIFT] - shallow[DRIFT])  # at least
        if facts[HEADROOM] <= 0:
            raise NotExtendable("with more blocks, DeepSpeed prefetches otherwise")
    return facts


def _counted(name: str, few: Any, more: Any, copies: int) -> Any:
    """A fact of the deeper run, from what it is in both tapes."""
    if few == more:
        return more
    if type(few) is int and type(more) is int:
        return more + copies * (more - few)
    if isinstance(few, list) and isinstance(more, list):  # such as sizes of parameters: one period is inserted
        added = len(more) - len(few)
        start = next((at for at in range(len(few)) if few[at] != more[at]), len(few))
        if added > 0 and more[:start] + more[start + added :] == few:
            return more[:start] + more[start : start + added] * (copies + 1) + more[start + added :]
    raise NotExtendable(f"{name} depends on depth, and not as a count or a list of what blocks have")


def _check(rows: NDArray[Any]) -> None:
    """See that storages live once, from birth to death, and that nothing waits for an event that never was.

    Raises:
        NotExtendable: they do not.
    """
    kind, ident, size = rows["kind"], rows["ident"], rows["size"]
    born, dead = np.flatnonzero(kind == Kind.ALLOC), np.flatnonzero(kind == Kind.FREE)
    if not np.array_equal(ident[born], np.arange(1, len(born) + 1)) or np.any(size < 0):
        raise NotExtendable("storages would not be numbered as they are born")
    ends = np.full(len(born) + 1, len(rows))
    used = np.flatnonzero(kind == Kind.RECORD_STREAM)
    for at in (dead, used):
        if len(at) and (ident[at].min() < 1 or ident[at].max() > len(born)):
            raise NotExtendable("storages would be used that are never born")
    ends[ident[dead]] = dead
    if len(np.unique(ident[dead])) != len(dead) or np.any(born[ident[dead] - 1] > dead):
        raise NotExtendable("storages would be freed twice, or before they are born")
    if not np.array_equal(size[born[ident[dead] - 1]], size[dead]):
        raise NotExtendable("storages would be freed with another size than they were born with")
    if np.any(born[ident[used] - 1] > used) or np.any(ends[ident[used]] < used):
        raise NotExtendable("storages would be used while they are not alive")
    recorded, waited = np.flatnonzero(kind == Kind.EVENT_RECORD), np.flatnonzero(kind == Kind.EVENT_WAIT)
    events, at = np.unique(ident[recorded], return_index=True)
    place = np.searchsorted(events, ident[waited])
    if len(waited) and (not np.array_equal(events[np.minimum(place, len(events) - 1)], ident[waited])):
        raise NotExtendable("events would be waited for that are never recorded")
    if np.any(recorded[at[place]] > waited):
        raise NotExtendable("events would be waited for before they are recorded")
