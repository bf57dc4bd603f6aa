from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.candidate import Candidate
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.depth import NotExtendable, extend, least_depth
from autotune.probe.virtual.headroom import HEADROOM
from autotune.probe.virtual.job import Job
from autotune.probe.virtual.tape import Kind, Place, Tape, TapeWriter
from autotune.settings import compose_settings
from autotune.space.config import deepspeed_config

BLOCKS = "model.layers"


@dataclasses.dataclass
class Program:
    """What a block does, for `build`.

    Attributes:
        parameters: bytes of each parameter of a block.
        actions: in forward, mirrored in backward.
        late: a forward frees what it gathered so many blocks later, and backward waits for the gather before.
        other: actions of the second half of the blocks; None where all are alike.
        micro_steps: of each step.
    """

    parameters: list[int]
    actions: list[tuple[str, int]]
    late: int = 0
    other: list[tuple[str, int]] | None = None
    micro_steps: int = 1


class Builder:
    """Runs a program of some depth, as an engine would, and writes the tape."""

    def __init__(self, program: Program, depth: int) -> None:
        self.program, self.depth = program, depth
        self.writer = TapeWriter()
        self.born = self.events = 0
        self.module = 0
        self.sizes: dict[int, int] = {}

    def row(self, kind: Kind, op: str = "", ident: int = 0, size: int = 0, place: int = 0, stream: int = 0) -> None:
        self.writer.rows.append((kind, place, stream, self.writer.name(op), self.module, ident, size))

    def make(self, size: int, op: str = "empty", place: int = Place.DEVICE, stream: int = 0) -> int:
        self.row(Kind.OP, op, 0, size)
        self.born += 1
        self.sizes[self.born] = size
        self.row(Kind.ALLOC, op, self.born, size, place, stream)
        return self.born

    def free(self, ident: int) -> None:
        module, self.module = self.module, 0
        self.row(Kind.FREE, "", ident, self.sizes.pop(ident))
        self.module = module

    def record(self) -> int:
        self.events += 1
        self.row(Kind.EVENT_RECORD, "", self.events, stream=1)
        return self.events

    def enter(self, block: int, part: str) -> None:
        self.module = self.writer.name(f"{BLOCKS}.{block}.{part}")

    def tape(self) -> Tape:
        program, depth, writer = self.program, self.depth, self.writer
        self.row(Kind.PHASE, "load")
        embedding = self.make(1000, "normal_")
        self.parameters = [
            [self.make(size, "normal_", place=Place.HOST) for size in program.parameters] for _ in range(depth)
        ]
        for name in ("model", "model.embed", BLOCKS):
            writer.name(name)
        for block in range(depth):
            for part in ("attention", "mlp", "mlp.act"):
                writer.name(f"{BLOCKS}.{block}.{part}")
        writer.name("model.head")
        writer.facts.update(depth=depth, parameters=[1000] + program.parameters * depth, blocks=BLOCKS)
        self.row(Kind.PHASE, "init")
        flat = self.make(40 + depth * sum(program.parameters), "cat")
        writer.roles[flat] = "parameters"
        self.states = [self.make(4 * sum(program.parameters), "zeros") for _ in range(depth)]
        for state in self.states:
            writer.roles[state] = "optimizer state"
        for ident in [i for block in self.parameters for i in block]:
            self.row(Kind.OP, "copy_", 0, self.sizes[ident])
            self.free(ident)
        for _ in range(2):
            for micro_step in range(program.micro_steps):
                self.micro_step(micro_step)
            self.row(Kind.PHASE, "step")
            norms = [self.make(512, "norm") for _ in program.parameters * depth]
            stacked = self.make(8 * len(norms) + 3, "stack")
            for norm in norms:
                self.free(norm)
            self.free(stacked)
            for block in range(depth):
                for gradient in reversed(self.gradients[block]):
                    self.row(Kind.OP, "add_", 7, self.sizes[gradient])
                    self.free(gradient)
        self.free(embedding)
        return writer.tape()

    def micro_step(self, index: int) -> None:
        depth = self.depth
        self.row(Kind.PHASE, "forward", index)
        saved: list[list[int]] = []
        gathered: list[int | None] = []
        carried, last = self.make(64), self.record()
        for block in range(depth):
            mine: list[int] = []
            self.enter(block, "attention")
            gathered.append(self.make(sum(self.program.parameters), "gather", stream=1))
            for action, size in self.actions(block):
                if action == "save":
                    mine.append(self.make(size))
                elif action == "pass":
                    self.enter(block, "mlp")
                    fresh = self.make(size, "mm")
                    self.free(carried)
                    carried = fresh
                elif action == "temporary":
                    self.free(self.make(size, "empty"))
                else:
                    self.row(Kind.EVENT_WAIT, "", last)
                    last = self.record()
            saved.append(mine)
            early = block - self.program.late
            if early >= 0 and (ident := gathered[early]) is not None:
                self.row(Kind.RECORD_STREAM, "", ident, stream=0)
                self.free(ident)
                gathered[early] = None
        self.module = self.writer.name("model.head")
        loss = self.make(4, "loss")
        self.free(carried)
        self.row(Kind.PHASE, "backward", index)
        if index == 0:
            self.gradients: list[list[int]] = [[] for _ in range(depth)]
        for block in reversed(range(depth)):
            self.enter(block, "attention")
            whole = gathered[block] or self.make(sum(self.program.parameters), "gather", stream=1)
            for action, size in reversed(self.actions(block)):
                if action == "save":
                    self.row(Kind.OP, "mm", size * 3, size)
                    self.free(saved[block].pop())
                elif action == "temporary":
                    self.free(self.make(2 * size, "mm"))
            fresh = [self.make(size, "mm") for size in self.program.parameters]
            if index == 0:
                self.gradients[block] = fresh
            else:
                for ident in fresh:
                    self.free(ident)
            self.free(whole)
        self.module = 0
        self.free(loss)

    def actions(self, block: int) -> list[tuple[str, int]]:
        halfway = self.program.other is not None and block >= self.depth // 2
        return (self.program.other or []) if halfway else self.program.actions


def build(program: Program, depth: int) -> Tape:
    return Builder(program, depth).tape()


def assert_same(got: Tape, wanted: Tape) -> None:
    assert got.names == wanted.names
    assert len(got.rows) == len(wanted.rows)
    different = np.flatnonzero(got.rows != wanted.rows)
    assert not len(different), (different[0], got.rows[different[0]], wanted.rows[different[0]])
    assert got.roles == wanted.roles
    assert {**got.facts, HEADROOM: 0} == {**wanted.facts, HEADROOM: 0}


GPT = Program([256, 64], [("save", 128), ("event", 0), ("temporary", 32), ("pass", 64), ("save", 8)])
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["save", "pass", "temporary", "event"]), st.sampled_from([8, 16, 512])),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("copies", [0, 1, 30])
def test_alike_blocks(copies: int) -> None:
    assert_same(extend(build(GPT, 4), build(GPT, 5), copies, BLOCKS), build(GPT, 5 + copies))


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_blocks_at_the_ends_of_a_loop_that_differ_from_those_between(late: int, micro_steps: int) -> None:
    program = dataclasses.replace(GPT, late=late, micro_steps=micro_steps)
    assert_same(extend(build(program, 5 + late), build(program, 6 + late), 20, BLOCKS), build(program, 26 + late))


def test_a_period_of_two_blocks_where_the_first_half_is_treated_otherwise() -> None:
    program = dataclasses.replace(GPT, other=[("save", 1024), ("temporary", 16)])
    assert_same(extend(build(program, 8), build(program, 10), 7, BLOCKS), build(program, 24))


def test_several_blocks_at_a_time_where_all_are_alike() -> None:
    assert_same(extend(build(GPT, 4), build(GPT, 7), 5, BLOCKS), build(GPT, 22))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([4, 64, 4096]), min_size=1, max_size=4),
    ACTIONS,
    st.one_of(st.none(), ACTIONS),
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(0, 4),
)
def test_any_program(
    parameters: list[int],
    actions: list[tuple[str, int]],
    other: list[tuple[str, int]] | None,
    late: int,
    micro_steps: int,
    copies: int,
) -> None:
    program = Program(parameters, actions, late, other, micro_steps)
    period = 1 if other is None else 2
    depth = period * (late + 5)
    extended = extend(build(program, depth), build(program, depth + period), copies, BLOCKS)
    assert_same(extended, build(program, depth + (copies + 1) * period))


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(0, 3), st.integers(1, 5))
def test_too_shallow_is_refused_or_right(actions: list[tuple[str, int]], late: int, more: int) -> None:
    program = Program([64, 4096], actions, late)
    depth = late + more
    try:
        extended = extend(build(program, depth), build(program, depth + 1), 6, BLOCKS)
    except NotExtendable:
        return
    assert_same(extended, build(program, depth + 7))


# -- what does not repeat ---------------------------------------------------------------------------------------------


def changed(tape: Tape, change: Any) -> Tape:
    rows = tape.rows.copy()
    return dataclasses.replace(tape, rows=change(rows))


def test_every_third_block_differs() -> None:
    class Flushing(Builder):
        def actions(self, block: int) -> list[tuple[str, int]]:
            return [*super().actions(block), *([("save", 5000)] if block % 3 == 2 else [])]

    for depth in range(6, 9):
        with pytest.raises(NotExtendable):
            extend(Flushing(GPT, depth).tape(), Flushing(GPT, depth + 1).tape(), 4, BLOCKS)
    assert_same(extend(Flushing(GPT, 9).tape(), Flushing(GPT, 12).tape(), 3, BLOCKS), Flushing(GPT, 21).tape())


def test_blocks_that_grow() -> None:
    class Growing(Builder):
        def actions(self, block: int) -> list[tuple[str, int]]:
            return [("save", 100 + block)]

    with pytest.raises(NotExtendable):
        extend(Growing(GPT, 7).tape(), Growing(GPT, 8).tape(), 4, BLOCKS)


def test_storages_that_are_freed_in_no_order() -> None:
    class Disorderly(Builder):
        def make(self, size: int, op: str = "empty", place: int = Place.DEVICE, stream: int = 0) -> int:
            ident = super().make(size, op, place, stream)
            if op == "gather":
                self.pool.append(ident)
            return ident

        def free(self, ident: int) -> None:
            if ident in self.pool:  # a gathered one, but which is drawn by lot
                self.pool.remove(ident)
                self.waiting.append(ident)
                if len(self.waiting) < 3:
                    return
                ident = self.waiting.pop(int(self.lots.integers(3)))
            super().free(ident)

        def tape(self) -> Tape:
            self.pool: list[int] = []
            self.waiting: list[int] = []
            self.lots = np.random.default_rng(1)
            return super().tape()

    program = dataclasses.replace(GPT, late=2)
    with pytest.raises(NotExtendable):
        extend(Disorderly(program, 8).tape(), Disorderly(program, 9).tape(), 4, BLOCKS)


def test_other_programs() -> None:
    other = dataclasses.replace(GPT, parameters=[256, 32])
    for shallow, deeper in ((GPT, other), (other, GPT)):
        with pytest.raises(NotExtendable):
            extend(build(shallow, 6), build(deeper, 7), 4, BLOCKS)


def test_the_deeper_one_first() -> None:
    with pytest.raises(NotExtendable):
        extend(build(GPT, 7), build(GPT, 6), 4, BLOCKS)


def test_other_blocks() -> None:
    with pytest.raises(NotExtendable):
        extend(build(GPT, 6), build(GPT, 7), 4, "transformer.h")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_row_too_few_or_too_many_anywhere(data: st.DataObject) -> None:
    shallow, deeper = build(GPT, 6), build(GPT, 7)
    at = data.draw(st.integers(0, len(deeper.rows) - 1))
    if deeper.rows["kind"][at] in (Kind.ALLOC, Kind.PHASE):
        deeper = changed(deeper, lambda rows: np.delete(rows, at))
    else:
        deeper = changed(deeper, lambda rows: np.insert(rows, at, rows[0]))
    with pytest.raises(NotExtendable):
        extend(shallow, deeper, 4, BLOCKS)


def test_a_tape_that_was_cut_short() -> None:
    shallow, deeper = build(GPT, 6), build(GPT, 7)
    for tape in (shallow, deeper):
        tape.facts["cut"] = True
    with pytest.raises(NotExtendable):
        extend(shallow, deeper, 4, BLOCKS)


def test_prefetches_that_come_too_close_to_their_limit() -> None:
    shallow, deeper = build(GPT, 6), build(GPT, 7)
    shallow.facts.update(prefetch_drift=60, prefetch_headroom=45)
    deeper.facts.update(prefetch_drift=70, prefetch_headroom=35)
    extend(shallow, deeper, 3, BLOCKS)
    with pytest.raises(NotExtendable, match="prefetch"):
        extend(shallow, deeper, 4, BLOCKS)


# -- how deep is enough -----------------------------------------------------------------------------------------------


def zero(**changes: Any) -> dict[str, Any]:
    limits = {"reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    return {"zero_optimization": {"stage": 3, "sub_group_size": 1e9, **limits, **changes}}


def test_least_depth_follows_what_stage_3_keeps_live() -> None:
    gpt20b, llama70b = 453_095_424, 855_654_400
    assert least_depth(llama70b, 1, zero()) < least_depth(gpt20b, 1, zero()) == 8
    assert least_depth(gpt20b, 2, zero()) == 14
    assert least_depth(gpt20b, 1, zero(stage3_max_live_parameters=4e9)) > 20


def test_no_depth_is_enough_where_a_bucket_or_a_group_holds_more_than_a_period() -> None:
    assert least_depth(218_112_000, 1, zero()) > 1000  # two blocks and a part fill the reduce bucket
    assert least_depth(218_112_000, 1, zero(reduce_bucket_size=1e8)) < 20
    assert least_depth(12_596_224, 1, zero(stage=0)) > 1000
    assert least_depth(453_095_424, 1, zero(), parameters=20_600_000_000, ranks=8) > 1000  # three sub-groups
    assert least_depth(453_095_424, 1, zero(), parameters=20_600_000_000, ranks=64) < 12


# -- DeepSpeed itself -------------------------------------------------------------------------------------------------

TINY = 198_272  # parameters of a block of gpt_tiny
CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"checkpoint_blocks": "all", "checkpoint_part": "attention", "checkpoint_input": "cpu"}, [7, 8, 10]),
    ({"checkpoint_blocks": "none", "offload_optimizer": "cpu", "offload_param": "cpu"}, [7, 8, 10]),
]


def test_equals_full_traces(tmp_path: Path) -> None:
    limit = int(2.2 * TINY)
    overrides = ["model=gpt_tiny", "machine=a100_80g"]
    machine = compose_settings(overrides).machine
    jobs, paths = [], {}
    for index, (knobs, depths) in enumerate(CASES):
        for depth in depths:
            workload = compose_settings([*overrides, f"model.config.num_hidden_layers={depth}"]).workload
            candidate = Candidate(micro_batch=1, accumulation=1, zero_stage=3, precision="bf16", **knobs)
            config = deepspeed_config(candidate, workload, machine)
            config["zero_optimization"] |= {
                "overlap_comm": True,
                "reduce_bucket_size": TINY // 2,
                "stage3_prefetch_bucket_size": TINY // 9,
                "stage3_param_persistence_threshold": 1000,
                "stage3_max_live_parameters": limit,
                "stage3_max_reuse_distance": limit,
            }
            paths[index, depth] = tmp_path / f"{index}-{depth}.npz"
            jobs.append(Job(workload, machine, config, 0, 1, [(candidate, str(paths[index, depth]))]))
    tracer = Tracer(machine, lambda text: None)
    try:
        tracer.run(jobs)
    finally:
        tracer.close()
    for index, (_, (few, more, full)) in enumerate(CASES):
        shallow, deeper, whole = (Tape.load(paths[index, depth]) for depth in (few, more, full))
        assert_same(extend(shallow, deeper, full - more, "gpt_neox.layers"), whole)
