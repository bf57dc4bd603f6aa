"""What a tape comes to on a device: peaks by phase, host memory, where it runs out, and who holds what."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.machine.machine import GIB, Machine
from autotune.probe.virtual.allocator import AllocatorSettings
from autotune.probe.virtual.prediction import Holder
from autotune.probe.virtual.replay import Replayed, erased, outside_bytes, pinned_bytes, replay
from autotune.probe.virtual.tape import Kind, Place
from autotune.workload.phase import Phase

from .script import Script

MIB, KIB = 2**20, 2**10
DEVICE = Machine(nodes=1, devices_per_node=1, device_memory_gib=1.0)
EMULATED = dataclasses.replace(DEVICE, accelerator="cpu")
WORKSPACE = 8
"""MiB of cuBLAS on WITH_CUBLAS."""
WITH_CUBLAS = dataclasses.replace(DEVICE, cublas_workspace_mib=WORKSPACE)


def play(script: Script, machine: Machine = DEVICE, **settings: bool) -> Replayed:
    return replay(script.tape(), machine, AllocatorSettings(**settings))


def step(script: Script) -> None:
    """A script goes on in the steady step's forward."""
    script.phase(Phase.FORWARD)


class TestPhases:
    def test_each_has_its_own_peak_and_what_is_left_at_its_end(self) -> None:
        script = Script()
        script.phase(Phase.LOAD)
        model = script.alloc(100 * MIB)
        script.phase(Phase.INIT)
        script.free(script.alloc(50 * MIB))
        script.phase(Phase.FORWARD, first=True)
        script.free(script.alloc(200 * MIB))
        step(script)
        saved = script.alloc(30 * MIB)
        script.phase(Phase.BACKWARD)
        gradient = script.alloc(20 * MIB)
        script.free(saved)
        script.phase(Phase.STEP)
        script.free(gradient)
        script.free(model)
        found = play(script)
        allocated = {name: memory.allocated // MIB for name, memory in found.phases.items()}
        live = {name: memory.live // MIB for name, memory in found.phases.items()}
        assert allocated == {
            "load": 100,
            "init": 150,
            "first_step": 300,
            "forward": 130,
            "backward": 150,
            "step": 120,
        }
        assert live == {"load": 100, "init": 100, "first_step": 100, "forward": 130, "backward": 120, "step": 0}
        assert found.peak_allocated == 150 * MIB  # of the steady step
        assert found.steady_allocated == 0
        assert found.peak_reserved == found.device_total == 350 * MIB  # what came before is left in the cache

    def test_a_phase_is_the_worst_of_its_micro_steps(self) -> None:
        script = Script()
        for micro_step, size in enumerate((10, 30, 20), 1):
            script.phase(Phase.FORWARD, micro_step)
            script.free(script.alloc(size * MIB))
            script.phase(Phase.BACKWARD, micro_step)
        assert play(script).phases["forward"].allocated == 30 * MIB

    def test_what_is_outside_of_the_allocator_counts_and_takes_room(self) -> None:
        machine = dataclasses.replace(DEVICE, devices_per_node=2, context_mib=100, nccl_mib=200)
        assert outside_bytes(machine) == 300 * MIB
        assert outside_bytes(dataclasses.replace(machine, devices_per_node=1)) == 100 * MIB  # nobody to talk to
        script = Script()
        step(script)
        script.alloc(724 * MIB)
        assert play(script, machine).device_total == GIB
        script.alloc(1)
        assert play(script, machine).oom is not None


class TestHostMemory:
    def test_is_no_device_memory(self) -> None:
        script = Script()
        step(script)
        script.alloc(8 * MIB)
        script.alloc(3 * MIB + 1, Place.HOST)
        pinned = script.alloc(5 * MIB, Place.PINNED)
        script.phase(Phase.BACKWARD)
        script.free(pinned)
        script.phase(Phase.STEP)
        found = play(script)
        assert found.peak_allocated == 8 * MIB
        assert found.phases["forward"].host == 3 * MIB + 1 + 8 * MIB
        assert found.phases["forward"].pinned == 8 * MIB  # the next power of two
        assert found.phases["step"].host == 3 * MIB + 1
        assert found.phases["step"].pinned == 0
        assert (found.host, found.pinned) == (11 * MIB + 1, 8 * MIB)

    def test_never_runs_out_here(self) -> None:
        script = Script()
        step(script)
        script.alloc(2**50, Place.HOST)
        script.alloc(2**50, Place.PINNED)
        assert play(script).oom is None

    @given(st.integers(1, 2**50))
    def test_is_pinned_in_powers_of_two(self, size: int) -> None:
        rounded = pinned_bytes(size)
        assert size <= rounded < 2 * size or size == rounded == 1
        assert rounded & (rounded - 1) == 0

    def test_of_nothing_is_nothing(self) -> None:
        assert pinned_bytes(0) == 0


class TestWorkspacesOfCublas:
    @staticmethod
    def matmul(script: Script, stream: int = 0, name: str = "aten::addmm.out") -> None:
        script.op(name, stream=stream)

    def test_there_is_one_for_each_stream_and_each_of_two_threads(self) -> None:
        script = Script()
        step(script)
        self.matmul(script)
        self.matmul(script, name="aten::bmm")
        self.matmul(script, stream=3)
        script.phase(Phase.BACKWARD)
        self.matmul(script)
        self.matmul(script)
        script.phase(Phase.STEP)
        self.matmul(script)  # in the thread of forward
        found = play(script, WITH_CUBLAS)
        assert [memory.live // MIB for memory in found.phases.values()] == [2 * WORKSPACE, 3 * WORKSPACE, 3 * WORKSPACE]

    def test_the_first_steps_backward_has_the_thread_of_backward(self) -> None:
        script = Script()
        for first in (True, False):
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
                script.phase(phase, first=first)
                self.matmul(script)
        assert play(script, WITH_CUBLAS).steady_allocated == 2 * WORKSPACE * MIB

    @pytest.mark.parametrize("name", ["aten::add.Tensor", "aten::native_layer_norm", "aten::_softmax"])
    def test_other_kernels_need_none(self, name: str) -> None:
        script = Script()
        step(script)
        script.op(name)
        assert play(script, WITH_CUBLAS).peak_allocated == 0

    def test_nor_do_products_on_the_host_or_an_emulated_device(self) -> None:
        script = Script()
        step(script)
        script.op("aten::mm", place=Place.HOST)
        assert play(script, WITH_CUBLAS).peak_allocated == 0
        self.matmul(script)
        assert play(script, EMULATED).peak_allocated == 0

    def test_one_that_does_not_fit_is_out_of_memory(self) -> None:
        script = Script()
        step(script)
        script.alloc(1020 * MIB)
        script.module = "head"
        self.matmul(script)
        found = play(script, WITH_CUBLAS)
        assert found.oom is not None
        assert (found.oom.module, found.oom.requested_bytes) == ("head", WORKSPACE * MIB)


class TestBlocksUsedOnAnotherStream:
    """A freed block that another stream has used is free again when something waits."""

    @staticmethod
    def reserved(*after: Kind) -> int:
        script = Script()
        step(script)
        ident = script.alloc(100 * MIB)
        script.mark(Kind.RECORD_STREAM, ident, 1)
        script.free(ident)
        for kind in after:
            script.mark(kind, 1, 0)
        script.alloc(100 * MIB)
        found = play(script)
        assert found.peak_allocated == 100 * MIB
        return found.peak_reserved // MIB

    def test_is_kept_until_then(self) -> None:
        assert self.reserved() == self.reserved(Kind.EVENT_RECORD) == 200

    @pytest.mark.parametrize("kind", [Kind.EVENT_WAIT, Kind.SYNCHRONIZE])
    def test_is_used_again_then(self, kind: Kind) -> None:
        assert self.reserved(kind) == 100

    def test_the_value_of_a_tensor_waits_for_its_own_stream_alone(self) -> None:
        reserved = []
        for stream in (1, 2):
            script = Script()
            step(script)
            ident = script.alloc(100 * MIB)
            script.mark(Kind.RECORD_STREAM, ident, 1)
            script.free(ident)
            script.op("aten::_local_scalar_dense", stream=stream)
            script.alloc(100 * MIB)
            reserved.append(play(script).peak_reserved // MIB)
        assert reserved == [100, 200]

    def test_a_host_tensor_does_not_take_part(self) -> None:
        script = Script()
        step(script)
        script.mark(Kind.RECORD_STREAM, script.alloc(MIB, Place.PINNED), 1)
        assert play(script).peak_reserved == 0


def test_emptying_the_cache_gives_back_what_is_not_used() -> None:
    script = Script()
    step(script)
    kept = script.alloc(100 * MIB)
    script.free(script.alloc(200 * MIB))
    script.mark(Kind.EMPTY_CACHE)
    script.phase(Phase.BACKWARD)
    script.free(kept)
    found = play(script)
    assert found.phases["forward"].reserved == 300 * MIB
    assert found.phases["backward"].reserved == 100 * MIB
    assert found.retries == 0


def test_a_cache_that_is_in_the_way_is_given_back_and_counted() -> None:
    script = Script()
    step(script)
    script.free(script.alloc(600 * MIB))
    script.alloc(700 * MIB)
    found = play(script)
    assert (found.oom, found.retries) == (None, 1)


def test_the_allocators_settings_count() -> None:
    script = Script()
    step(script)
    script.free(script.alloc(600 * MIB))
    script.alloc(700 * MIB)
    found = play(script, expandable_segments=True)
    assert (found.retries, found.peak_reserved) == (0, 700 * MIB)


class TestOutOfMemory:
    @pytest.fixture
    def script(self) -> Script:
        script = Script()
        script.phase(Phase.INIT)
        script.alloc(500 * MIB, role="parameters")
        step(script)
        script.module = "layers.0.mlp"
        script.alloc(300 * MIB)
        script.phase(Phase.BACKWARD)
        script.module = "layers.7.attention"
        script.alloc(400 * MIB)
        script.phase(Phase.STEP)
        script.alloc(100 * MIB)
        return script

    def test_says_where_what_and_who_holds_the_rest(self, script: Script) -> None:
        found = play(script)
        assert found.oom is not None
        assert (found.oom.phase, found.oom.module) == (Phase.BACKWARD, "layers.7.attention")
        assert found.oom.requested_bytes == 400 * MIB
        assert found.oom.allocated_bytes == found.oom.reserved_bytes == 800 * MIB
        assert found.holders == [
            Holder("parameters", "", 500 * MIB),
            Holder("activations", "layers.*.mlp", 300 * MIB),
        ]

    def test_ends_the_replay(self, script: Script) -> None:
        found = play(script)
        assert list(found.phases) == ["init", "forward", "backward"]
        assert found.phases["backward"].allocated == 800 * MIB

    def test_in_the_first_step_is_in_the_phase_of_training_that_it_was(self) -> None:
        script = Script()
        script.phase(Phase.FORWARD, first=True)
        script.alloc(600 * MIB)
        script.phase(Phase.BACKWARD, first=True)
        script.alloc(600 * MIB)
        found = play(script)
        assert found.oom is not None
        assert found.oom.phase is Phase.BACKWARD
        assert [holder.bytes for holder in found.holders] == [600 * MIB]

    def test_where_nothing_was_held_is_held_by_nobody(self) -> None:
        script = Script()
        script.phase(Phase.LOAD)
        script.alloc(2 * GIB)
        found = play(script)
        assert found.oom is not None
        assert (found.oom.allocated_bytes, found.holders) == (0, [])


class TestAnEmulatedDevice:
    def test_neither_rounds_nor_caches(self) -> None:
        script = Script()
        step(script)
        script.alloc(1000)
        freed = script.alloc(3 * MIB)
        script.mark(Kind.RECORD_STREAM, freed, 1)
        script.free(freed)
        script.alloc(7)
        script.mark(Kind.EVENT_WAIT)
        script.mark(Kind.EMPTY_CACHE)
        script.phase(Phase.STEP)
        found = play(script, EMULATED)
        assert found.phases["forward"].allocated == found.phases["forward"].reserved == 3 * MIB + 1000
        assert found.phases["step"].reserved == found.steady_allocated == 1007
        assert found.holders == [Holder("activations", "", 3 * MIB + 1000, 2)]

    def test_is_full_at_its_last_byte(self) -> None:
        script = Script()
        step(script)
        script.alloc(GIB)
        assert play(script, EMULATED).oom is None
        script.alloc(1)
        found = play(script, EMULATED)
        assert found.oom is not None
        assert (found.oom.requested_bytes, found.oom.allocated_bytes) == (1, GIB)


class TestHolders:
    def test_roles_come_first_then_the_phase_of_birth(self) -> None:
        script = Script()
        script.phase(Phase.INIT)
        script.alloc(64 * MIB, role="parameters")
        script.alloc(32 * MIB, role="optimizer state")
        script.phase(Phase.BACKWARD, first=True)
        script.alloc(8 * MIB)  # made in backward, and never said what it is
        for micro_step in (1, 2):
            script.phase(Phase.FORWARD, micro_step)
            for block in (0, 11):
                script.module = f"model.layers.{block}.mlp"
                script.alloc(2 * MIB)
            script.phase(Phase.BACKWARD, micro_step)
            script.module = "model.layers.11.mlp"
            script.alloc(4 * MIB, role="gradients")
            script.alloc(MIB)
        assert [holder for holder in play(script).holders if holder.kind != "allocator slack"] == [
            Holder("parameters", "", 64 * MIB),
            Holder("optimizer state", "", 32 * MIB),
            Holder("temporaries", "", 8 * MIB),
            Holder("activations", "model.layers.*.mlp", 8 * MIB, 4),
            Holder("gradients", "", 8 * MIB, 2),
            Holder("temporaries", "model.layers.*.mlp", 2 * MIB, 2),
        ]

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("", ""),
            ("model.layers.12.mlp.act", "model.layers.*.mlp.act"),
            ("transformer.h.0", "transformer.h.*"),
            ("experts.3.up.0", "experts.*.up.*"),
            ("layer4.conv2d", "layer4.conv2d"),
        ],
    )
    def test_blocks_share_a_name(self, module: str, name: str) -> None:
        assert erased(module) == name

    def test_slack_and_what_is_outside_make_up_the_rest_of_the_device(self) -> None:
        machine = dataclasses.replace(WITH_CUBLAS, context_mib=100)
        script = Script()
        step(script)
        script.free(script.alloc(50 * MIB))
        script.alloc(30 * MIB, role="parameters")
        script.op("aten::mm")
        script.alloc(40 * MIB, role="gradients")
        assert play(script, machine).holders == [
            Holder("outside the allocator", "", 100 * MIB),
            Holder("gradients", "", 40 * MIB),
            Holder("parameters", "", 30 * MIB),
            Holder("allocator slack", "", 12 * MIB),  # of the first 50, with 30 and the workspace in it
            Holder("temporaries", "cuBLAS workspace", WORKSPACE * MIB),
        ]

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["alloc", "alloc", "free", "mm", "phase"]),
                st.integers(1, 40 * MIB),
                st.sampled_from([None, "parameters", "gradients"]),
                st.sampled_from(["", "layers.0.mlp", "layers.1.mlp", "head"]),
                st.integers(0, 2),
            ),
            max_size=40,
        ),
        st.sampled_from([DEVICE, WITH_CUBLAS, EMULATED, dataclasses.replace(WITH_CUBLAS, context_mib=77)]),
        st.sampled_from([1.0, 0.15]),
    )
    def test_add_up_to_what_is_held_at_the_peak(
        self, events: list[tuple[str, int, str | None, str, int]], machine: Machine, memory: float
    ) -> None:
        machine = dataclasses.replace(machine, device_memory_gib=memory)
        script = Script()
        script.phase(Phase.INIT)
        alive = []
        for index, (what, size, role, module, stream) in enumerate(events):
            script.module = module
            if what == "alloc":
                alive.append(script.alloc(size, stream=stream, role=role))
            elif what == "free" and alive:
                script.free(alive.pop(size % len(alive)))
            elif what == "mm":
                script.op("aten::mm", stream=stream)
            elif what == "phase":
                script.phase([Phase.FORWARD, Phase.BACKWARD, Phase.STEP][stream], first=index < 5)
        found = play(script, machine)
        sums = {"allocator slack": 0, "outside the allocator": 0, "": 0}
        for holder in found.holders:
            sums[holder.kind if holder.kind in sums else ""] += holder.bytes
        allocated = found.oom.allocated_bytes if found.oom else found.peak_allocated
        unsplit = allocated - sums[""]  # less than 1 MiB of a large block may be more than was asked for
        assert 0 <= unsplit < MIB * sum(h.count for h in found.holders) or unsplit == 0
        if machine.accelerator == "cpu" or all(size <= MIB for _, size, *_ in events):
            assert unsplit == 0
        assert sums["outside the allocator"] == outside_bytes(machine)
        if found.oom:
            assert sums[""] + sums["allocator slack"] == found.oom.reserved_bytes
        else:
            assert sums[""] + sums["allocator slack"] <= found.peak_reserved
        assert found.holders == sorted(found.holders, key=lambda holder: -holder.bytes)
