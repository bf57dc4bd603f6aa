"""The model allocates, reserves and runs out of memory as PyTorch's CUDA caching allocator does.

A test named in a comment is one of PyTorch's own (test/test_cuda.py), recomputed with the numbers that it states.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from autotune.probe.virtual.allocator import AllocatorSettings, CachingAllocator, DeviceOutOfMemory
from autotune.probe.virtual.allocator_blocks import CACHED, UNMAPPED, USED, Block

MIB = 1024 * 1024
GIB = 1024 * MIB
EXPANDABLE = AllocatorSettings(expandable_segments=True)
EITHER = pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["segments", "expandable"])


def filled(*sizes: int, **arguments: Any) -> CachingAllocator:
    """An allocator with blocks 0, 1, … of these sizes."""
    allocator = CachingAllocator(**arguments)
    for ident, size in enumerate(sizes):
        allocator.malloc(ident, size)
    return allocator


# Settings


def test_the_settings_are_read_as_torch_reads_them() -> None:
    conf = "expandable_segments:True, garbage_collection_threshold:0.8,max_split_size_mb:512,"
    assert AllocatorSettings.parse(conf) == AllocatorSettings(True, 0.8, 512 * MIB)
    assert AllocatorSettings.parse("") == AllocatorSettings.parse("expandable_segments:False") == AllocatorSettings()
    assert AllocatorSettings.parse("max_split_size_mb:20").max_split_size_bytes == 20 * MIB


@pytest.mark.parametrize(
    "conf",
    [
        *["foo:1,bar:2", "garbage_collection_threshold:1.2", "max_split_size_mb:2"],  # test_allocator_settings
        *["garbage_collection_threshold:0", "garbage_collection_threshold:1", "garbage_collection_threshold:nan"],
        *["max_split_size_mb:19", "max_split_size_mb:1.5", "max_split_size_mb:abc", "max_split_size_mb"],
        *["expandable_segments:true", "expandable_segments", "expandable_segments=True"],
        *["roundup_power2_divisions:4", "backend:cudaMallocAsync"],  # torch knows them, the model does not
    ],
)
def test_a_setting_that_torch_refuses_or_the_model_lacks_is_an_error(conf: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        AllocatorSettings.parse(conf)


# Sizes


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1024, 1024, 2 * MIB),  # test_memory_stats: 256 floats make 1 kB active
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB - (2 * MIB - 512), 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a remainder of 1 MiB stays with the block
        (84 * MIB, 84 * MIB, 84 * MIB),  # test_allocator_settings: 21 Mi floats
    ],
)
def test_a_request_is_rounded_and_its_segment_too(size: int, allocated: int, reserved: int) -> None:
    allocator = filled(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (allocated, reserved)
    allocator.free(0)
    assert (allocator.allocated, allocator.reserved) == (0, reserved)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [(1, 512, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB), (11 * MIB, 11 * MIB, 20 * MIB), (41 * MIB, 41 * MIB, 60 * MIB)],
)
def test_an_expandable_segment_grows_by_pages_and_is_split_finely(size: int, allocated: int, reserved: int) -> None:
    allocator = filled(size, settings=EXPANDABLE)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_small_blocks_share_a_segment_of_two_mib() -> None:
    allocator = filled(MIB, MIB)  # test_mempool_with_allocator: one segment, and a second for the third
    assert allocator.reserved == 2 * MIB
    allocator.malloc(2, MIB)
    assert allocator.reserved == 4 * MIB


def test_blocks_below_ten_mib_share_a_segment_of_twenty() -> None:
    allocator = filled(4 * MIB, 4 * MIB)  # test_mempool_no_split: the pool that splits has one segment, three blocks
    assert [block.size for block in blocks(allocator)] == [4 * MIB, 4 * MIB, 12 * MIB]
    assert allocator.inactive_split == 12 * MIB


@EITHER
def test_streams_and_pools_do_not_share(settings: AllocatorSettings) -> None:
    allocator = filled(9 * MIB, settings=settings)
    allocator.free(0)
    allocator.malloc(1, 9 * MIB, stream=1)
    allocator.malloc(2, 1)
    assert allocator.reserved == 42 * MIB
    allocator.malloc(3, 9 * MIB)
    allocator.malloc(4, 1)
    assert allocator.reserved == 42 * MIB


def test_the_smallest_free_block_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    allocator = filled(40 * MIB, 30 * MIB, 30 * MIB)
    for ident in range(3):
        allocator.free(ident)
    allocator.malloc(3, 25 * MIB)
    assert [(block.size, block.state) for block in blocks(allocator)] == [
        *[(40 * MIB, CACHED), (25 * MIB, USED), (5 * MIB, CACHED), (30 * MIB, CACHED)]
    ]


def test_freed_neighbours_become_one_block() -> None:
    allocator = filled(4 * MIB, 5 * MIB, 6 * MIB)
    allocator.free(0)
    allocator.free(2)
    assert [block.size for block in blocks(allocator)] == [4 * MIB, 5 * MIB, 11 * MIB]
    assert allocator.inactive_split == 15 * MIB
    allocator.free(1)
    assert [block.size for block in blocks(allocator)] == [20 * MIB]
    assert allocator.inactive_split == 0


def test_a_name_in_use_and_one_unknown_are_refused() -> None:
    allocator = filled(1, 0)
    with pytest.raises(ValueError, match="block 0"):
        allocator.malloc(0, 1)
    allocator.record_stream(1, 2)
    allocator.free(1)
    with pytest.raises(KeyError):
        allocator.free(1)


@EITHER
def test_peaks_start_again_from_the_current_values(settings: AllocatorSettings) -> None:
    allocator = filled(100 * MIB, MIB, settings=settings)
    allocator.free(0)
    allocator.empty_cache()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (101 * MIB, 102 * MIB)
    assert (allocator.allocated, allocator.reserved) == (MIB, 2 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (MIB, 2 * MIB)


# Streams


def test_a_recorded_block_is_not_used_again_before_the_other_stream_is_done() -> None:
    allocator = CachingAllocator()  # test_record_stream, with blocks of which two fill a segment
    main, side = 0, 1
    allocator.malloc(0, MIB, side)
    allocator.record_stream(0, main)
    allocator.free(0)
    assert allocator.allocated == 0  # as torch counts: freed, though not yet free
    allocator.malloc(1, MIB, side)
    allocator.malloc(2, MIB, side)
    assert allocator.reserved == 4 * MIB  # "allocation reused too soon"
    allocator.synchronize(main)
    allocator.malloc(3, MIB, side)
    allocator.malloc(4, MIB, side)
    assert allocator.reserved == 4 * MIB  # "allocation not reused"


def test_the_stream_that_a_block_was_allocated_for_does_not_free_it_for_another() -> None:
    allocator = CachingAllocator()  # test_record_stream_on_shifted_view
    allocator.malloc(0, 20 * MIB, 1)
    allocator.record_stream(0, 2)
    allocator.free(0)
    allocator.synchronize(1)
    allocator.malloc(1, 20 * MIB, 1)
    assert allocator.reserved == 40 * MIB


def test_a_block_waits_for_every_stream_and_only_for_what_came_before_its_free() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 20 * MIB)
    for stream in (0, 1, 2, 2):  # its own is ordered anyway
        allocator.record_stream(0, stream)
    allocator.synchronize()
    allocator.free(0)
    allocator.synchronize(1)
    allocator.malloc(1, 20 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.synchronize(2)
    allocator.malloc(2, 20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_request_that_does_not_fit_waits_for_the_streams() -> None:
    allocator = filled(60 * MIB, capacity=100 * MIB)
    allocator.record_stream(0, 1)
    allocator.free(0)
    allocator.malloc(1, 50 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 50 * MIB)


# Running out of memory


def test_more_than_the_capacity_is_out_of_memory() -> None:
    total = 16 * GIB  # test_set_per_process_memory_fraction: half of the device is allowed
    allocator = filled(4096, capacity=total // 2)
    allocator.malloc(1, int(total * 0.499) - allocator.peak_reserved)
    allocator.free(1)
    allocator.empty_cache()
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(2, total // 2)
    assert (caught.value.requested_bytes, caught.value.segment_bytes) == (8 * GIB, 8 * GIB)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (4096, 2 * MIB)
    assert (allocator.allocated, allocator.ooms, allocator.retries) == (4096, 1, 1)


@EITHER
def test_after_an_out_of_memory_what_is_freed_can_be_allocated_again(settings: AllocatorSettings) -> None:
    total = 80 * GIB  # test_out_of_memory_retry: two halves of a device of which the context has a part
    allocator = filled(total // 2, capacity=total - 500 * MIB, settings=settings)
    with pytest.raises(DeviceOutOfMemory):
        allocator.malloc(1, total // 2)
    allocator.free(0)
    allocator.malloc(1, total // 2)
    assert (allocator.allocated, allocator.retries, allocator.ooms) == (40 * GIB, 1, 1)


def test_unused_segments_are_given_back_before_a_request_fails() -> None:
    allocator = filled(40 * MIB, 40 * MIB, 1, capacity=100 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(3, 90 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.ooms) == (92 * MIB, 1, 0)


def test_a_partly_used_segment_is_kept_and_an_expandable_one_gives_back_its_free_pages() -> None:
    plain = filled(4 * MIB, 4 * MIB, capacity=40 * MIB)
    expandable = filled(50 * MIB, 1 * MIB + 1, capacity=100 * MIB, settings=EXPANDABLE)
    for allocator, reserved in ((plain, 20 * MIB), (expandable, 20 * MIB)):
        allocator.free(0)
        allocator.empty_cache()
        assert allocator.reserved == reserved
    assert plain.inactive_split == 16 * MIB
    assert expandable.inactive_split == 0  # torch counts none there
    expandable.malloc(2, 48 * MIB)  # the pages below the block that is left are mapped again, 10 MiB of them are mapped
    assert expandable.reserved == 60 * MIB
    assert [(block.size, block.state) for block in blocks(expandable)][:3] == [
        *[(48 * MIB, USED), (2 * MIB, CACHED), (MIB + 512, USED)]
    ]


def test_fragments_of_plain_segments_run_out_of_memory_where_an_expandable_one_does_not() -> None:
    sizes = [30 * MIB, 40 * MIB]
    for settings, ooms in ((AllocatorSettings(), 1), (EXPANDABLE, 0)):
        allocator = filled(*sizes, capacity=80 * MIB, settings=settings)
        allocator.free(0)
        allocator.free(1)
        allocator.malloc(2, 22 * MIB)
        allocator.malloc(3, 32 * MIB)
        try:
            allocator.malloc(4, 16 * MIB)
        except DeviceOutOfMemory:
            assert allocator.allocated == 54 * MIB
        assert allocator.ooms == ooms


@EITHER
def test_an_absurd_request_fails_whatever_the_settings(settings: AllocatorSettings) -> None:
    split = AllocatorSettings(settings.expandable_segments, None, GIB)  # test_raises_oom, with max_split_size_mb:1024
    for either in (settings, split):
        with pytest.raises(DeviceOutOfMemory):
            filled(4 * 1024 * GIB, capacity=80 * GIB, settings=either)


# max_split_size


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_that_may_not_be_split_make_way_for_a_larger_one(expandable: bool) -> None:
    settings = AllocatorSettings(expandable, None, 40 * MIB)  # test_max_split_expandable, one kind of segment at a time
    allocator = filled(40 * MIB, 40 * MIB, 40 * MIB, capacity=120 * MIB, settings=settings)
    with pytest.raises(DeviceOutOfMemory):
        allocator.malloc(3, 40 * MIB)
    for ident in range(3):
        allocator.free(ident)
    allocator.malloc(4, 120 * MIB)
    assert allocator.reserved == 120 * MIB
    assert allocator.retries == 1  # the one that failed: here releasing the oversize blocks was enough


def test_an_oversize_block_serves_only_oversize_requests_of_nearly_its_size() -> None:
    settings = AllocatorSettings(max_split_size_bytes=40 * MIB)
    allocator = filled(100 * MIB, settings=settings)
    allocator.free(0)
    allocator.malloc(1, 30 * MIB)
    assert allocator.reserved == 130 * MIB
    allocator.malloc(2, 80 * MIB)  # smaller by 20 MiB
    assert allocator.reserved == 210 * MIB
    allocator.malloc(3, 80 * MIB + 512)
    assert allocator.reserved == 210 * MIB
    assert allocator.allocated == 210 * MIB  # whole
    assert allocator.inactive_split == 0


def test_only_as_many_oversize_blocks_are_released_as_the_request_needs() -> None:
    settings = AllocatorSettings(max_split_size_bytes=40 * MIB)
    allocator = filled(40 * MIB, 50 * MIB, 60 * MIB, 30 * MIB, capacity=180 * MIB, settings=settings)
    for ident in range(4):
        allocator.free(ident)
    allocator.malloc(4, 84 * MIB)  # no single one is large enough: 60 and 50 go
    assert (allocator.reserved, allocator.retries) == (154 * MIB, 0)
    allocator.malloc(5, 38 * MIB)  # the smallest that is large enough goes: 40
    assert (allocator.reserved, allocator.retries) == (152 * MIB, 0)
    allocator.malloc(6, 36 * MIB)  # none of them is left: everything unused goes
    assert (allocator.reserved, allocator.retries) == (158 * MIB, 1)


# Garbage collection


@pytest.mark.parametrize("expandable", [False, True])
def test_garbage_collection_makes_room_before_a_segment_is_asked_for(expandable: bool) -> None:
    settings = AllocatorSettings(expandable, 0.5)  # test_garbage_collect_expandable, one kind of segment at a time
    allocator = filled(40 * MIB, 40 * MIB, capacity=120 * MIB, settings=settings)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(2, 80 * MIB)
    assert (allocator.reserved, allocator.retries) == (80 * MIB, 0)


def test_garbage_collection_takes_the_segments_that_were_unused_longest() -> None:
    sizes = [size * MIB for size in (20, 22, 24)]
    allocator = filled(*sizes, 1, capacity=400 * MIB, settings=AllocatorSettings(False, 0.5))
    allocator.free(0)
    for _ in range(10):  # small requests do not age the large segments
        allocator.free(3)
        allocator.malloc(3, 1)
    allocator.free(3)
    allocator.malloc(4, 26 * MIB)
    allocator.free(1)
    allocator.malloc(5, 28 * MIB)
    allocator.malloc(6, 30 * MIB)
    allocator.free(2)
    allocator.malloc(7, 60 * MIB)
    assert allocator.reserved == 212 * MIB
    # Of 20, 22 and 24 MiB the ages are now 5, 4 and 2 requests; the two above their mean go, more than is needed.
    allocator.malloc(8, 62 * MIB)
    assert [block.size for block in blocks(allocator) if block.state == CACHED] == [24 * MIB, 2 * MIB]
    assert (allocator.reserved, allocator.retries) == (232 * MIB, 0)


@pytest.mark.parametrize("capacity", [None, 400 * MIB])
def test_garbage_collection_is_left_alone_below_its_threshold_and_without_a_capacity(capacity: int | None) -> None:
    allocator = filled(40 * MIB, 60 * MIB, capacity=capacity, settings=AllocatorSettings(False, 0.5))
    allocator.free(0)
    allocator.malloc(2, 80 * MIB)
    assert allocator.reserved == 180 * MIB


# Longer runs


def test_statistics_rise_and_fall_with_the_tensors() -> None:
    allocator = CachingAllocator()  # _test_memory_stats_generator, floats, N = 35
    sizes = [4, 800, 480_000_000, *(16 * i * i for i in range(1, 18)), *(4 * 693 * i**4 for i in range(5, 22)), 0]
    for ident, size in enumerate(sizes):
        before = allocator.allocated
        allocator.malloc(ident, size)
        assert allocator.allocated > before or size == 0
        assert allocator.allocated == allocator.peak_allocated
        assert allocator.reserved == allocator.peak_reserved
    for ident in range(len(sizes) - 1, 2, -1):
        allocator.free(ident)
    # m1 there: 512 and 1024 bytes, and 480 MB with the 242 KiB by which its segment is larger, too little to split off
    assert allocator.allocated == 1536 + 229 * 2 * MIB
    for ident in range(3):
        allocator.free(ident)
    reserved = allocator.reserved
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, allocator.peak_reserved) == (0, 0, reserved)


@EITHER
def test_ten_thousand_random_calls_agree_with_the_reference(settings: AllocatorSettings) -> None:
    draw = random.Random(123)  # test_allocator_fuzz: its sizes, weights and seed
    allocator, reference = CachingAllocator(settings=settings), reference_for(None, settings)
    live: dict[int, int] = {}
    for ident in range(10_000):
        while sum(live.values()) >= GIB // 10:
            allocator.free(chosen := draw.choice(list(live)))
            reference.free(chosen)
            del live[chosen]
        (action,) = draw.choices(["malloc", "free", "empty"], weights=[1, 1 if live else 0, 0.1])
        if action == "malloc":
            live[ident] = 4 * draw.randrange(2 * MIB // 4, 20 * MIB // 4)
            allocator.malloc(ident, live[ident])
            reference.malloc(ident, live[ident], 0)
        elif action == "free":
            allocator.free(chosen := draw.choice(list(live)))
            reference.free(chosen)
            del live[chosen]
        else:
            allocator.empty_cache()
            reference.empty_cache()
        assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)
    check(allocator, None)


# Hypothesis draws small integers from a wide range: mebibytes are counted so that there are large requests among them.
MEBIBYTES = st.builds(lambda mib, more: mib * MIB + more, st.integers(0, 50), st.sampled_from([0, 0, 1, 512, 700_000]))
SIZES = st.one_of(st.integers(0, 2000).map(lambda half: half * 512), MEBIBYTES, st.sampled_from([MIB, 11 * MIB]))
STREAMS = st.integers(0, 2)
NUMBERS = st.integers(0, 30)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("malloc"), SIZES, st.just(0)),
        st.tuples(st.just("free"), NUMBERS, STREAMS),
        st.tuples(st.just("record"), NUMBERS, STREAMS),
        st.tuples(st.just("synchronize"), st.none() | STREAMS, STREAMS),
        st.tuples(st.just("empty"), STREAMS, STREAMS),
    ),
    min_size=10,
    max_size=90,  # hypothesis draws about half of it
)
SETTINGS = st.builds(
    AllocatorSettings,
    st.booleans(),
    st.sampled_from([None, None, 0.3, 0.7]),
    st.sampled_from([None, None, 20 * MIB, 33 * MIB, 40 * MIB]),
)
FREES = st.lists(st.booleans(), max_size=100)
CAPACITIES = st.one_of(*[st.integers(0, 125).map(lambda count: count * 2 * MIB)] * 3, st.none())


@hypothesis_settings(max_examples=250, deadline=None)
@given(CALLS, CAPACITIES, SETTINGS)
def test_any_calls_keep_the_invariants(
    calls: list[tuple[str, Any, int]], capacity: int | None, settings: AllocatorSettings
) -> None:
    allocator = CachingAllocator(capacity, settings)
    live: list[int] = []
    for ident, call in enumerate(calls):
        play(allocator, live, ident, call)
        check(allocator, capacity)
    assert capacity is not None or allocator.ooms == 0
    for ident in live:
        allocator.free(ident)
    allocator.synchronize()
    allocator.empty_cache()
    check(allocator, capacity)
    assert allocator.reserved == allocator.allocated == allocator.inactive_split == 0


@hypothesis_settings(max_examples=250, deadline=None)
@given(CALLS, CAPACITIES, st.booleans(), st.sampled_from([None, 20 * MIB, 33 * MIB]))
def test_any_calls_agree_with_the_reference(
    calls: list[tuple[str, Any, int]], capacity: int | None, expandable: bool, max_split: int | None
) -> None:
    settings = AllocatorSettings(expandable, None, None if expandable else max_split)
    allocator, reference = CachingAllocator(capacity, settings), reference_for(capacity, settings)
    live: list[int] = []
    for ident, call in enumerate(calls):
        again = list(live)
        play(allocator, live, ident, call)
        play(reference, again, ident, call)
        assert again == live
        assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)
        assert (allocator.retries, allocator.ooms) == (reference.retries, reference.ooms)


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10 * 2048 - 1).map(lambda half: half * 512), STREAMS), min_size=5, max_size=60),
    FREES,
    st.booleans(),
)
def test_a_second_round_of_last_in_first_out_reserves_no_more_than_the_first(
    sizes: list[tuple[int, int]], frees: list[bool], expandable: bool
) -> None:
    allocator = CachingAllocator(settings=AllocatorSettings(expandable))
    reserved = []
    for _ in range(2):
        stack: list[int] = []
        choices = itertools.chain(frees, itertools.repeat(False))
        for ident, (size, stream) in enumerate(sizes):
            allocator.malloc(ident, size, stream)
            stack.append(ident)
            while next(choices) and stack:
                allocator.free(stack.pop())
        while stack:
            allocator.free(stack.pop())
        reserved.append(allocator.reserved)
    assert reserved[1] == reserved[0]


def test_segments_of_different_sizes_can_make_a_second_round_reserve_more() -> None:
    plain, expandable = CachingAllocator(), CachingAllocator(settings=EXPANDABLE)
    for reserved in (36 * MIB, 52 * MIB):  # 5 and 15 MiB share 20 at first; then 5 MiB takes the segment of 16
        for ident, size in enumerate((5 * MIB, 16 * MIB, 15 * MIB)):
            plain.malloc(ident, size)
            expandable.malloc(ident, size)
        for ident in (2, 1, 0):
            plain.free(ident)
            expandable.free(ident)
        assert plain.reserved == reserved
        assert expandable.reserved == 40 * MIB


# Helpers


def play(target: Any, live: list[int], ident: int, call: tuple[str, Any, int]) -> None:
    """Make a call to an allocator or to a reference; `live` is kept."""
    name, value, stream = call
    if name == "malloc":
        try:
            target.malloc(ident, value, stream)
        except DeviceOutOfMemory:
            return
        live.append(ident)
    elif name == "synchronize":
        target.synchronize(value)
    elif name == "empty":
        target.empty_cache()
    elif live:
        chosen = live[value % len(live)]
        if name == "free":
            live.remove(chosen)
            target.free(chosen)
        else:
            target.record_stream(chosen, stream)


def segments(allocator: CachingAllocator) -> Iterator[list[Block]]:
    """Every segment's blocks in order, from lists that the allocator keeps for other purposes."""
    known = [block for block in allocator._live.values() if block is not None]
    known += [block for waiting in allocator._pending.values() for block in waiting] + allocator._finished
    for pool in allocator._pools.values():
        assert pool.keys == sorted(pool.blocks)
        assert all(block.state == CACHED and block.pool is pool for block in pool.blocks.values())
        assert all(key == block.size << 64 | block.address for key, block in pool.blocks.items())
        assert all(block.state == UNMAPPED and block.pool is pool for block in pool.unmapped)
        known += [*pool.blocks.values(), *pool.unmapped]
    for block in {id(block): block for block in known if block.previous is None}.values():
        chain, after = [block], block.next
        while after is not None:
            assert after.previous is chain[-1]
            chain.append(after)
            after = after.next
        yield chain


def blocks(allocator: CachingAllocator) -> list[Block]:
    """Every block, in order of addresses within a pool."""
    return sorted((block for chain in segments(allocator) for block in chain), key=lambda block: block.address)


def check(allocator: CachingAllocator, capacity: int | None) -> None:
    """The invariants."""
    reserved = inactive = in_use = 0
    for chain in segments(allocator):
        for one, other in itertools.pairwise(chain):
            assert other.address == one.address + one.size
            assert one.state == USED or other.state != one.state
        for block in chain:
            assert block.size > 0
            assert block.size % 512 == 0
            page = block.pool.page
            assert block.state != UNMAPPED or block.size % page == block.address % page == 0
        reserved += sum(block.size for block in chain if block.state != UNMAPPED)
        in_use += sum(block.size for block in chain if block.state == USED)
        if len(chain) > 1 and not allocator._expandable:
            inactive += sum(block.size for block in chain if block.state == CACHED)
    allocated = sum(block.size for block in allocator._live.values() if block is not None)
    assert (allocator.allocated, allocator.reserved, allocator.inactive_split) == (allocated, reserved, inactive)
    assert allocated <= in_use <= reserved
    assert capacity is None or allocator.peak_reserved <= capacity
    assert allocator.peak_allocated >= allocated
    assert allocator.peak_reserved >= reserved


class Reference(ABC):
    """What both references share: names, events and the order of attempts. Everything is searched through, slowly."""

    def __init__(self, capacity: int | None, max_split: int | None) -> None:
        self.capacity = float("inf") if capacity is None else capacity
        self.max_split = float("inf") if max_split is None else max_split
        self.live: dict[int, tuple[int, set[int]]] = {}  # bytes; other streams that use it
        self.waiting: dict[int, set[int]] = {}
        self.done: set[int] = set()
        self.retries = self.ooms = 0

    @property
    def allocated(self) -> int:
        return sum(size for size, _ in self.live.values())

    @property
    @abstractmethod
    def reserved(self) -> int: ...

    @abstractmethod
    def place(self, ident: int, size: int, stream: int, grow: bool) -> int | None: ...

    @abstractmethod
    def vacate(self, ident: int) -> None: ...

    @abstractmethod
    def shrink(self) -> None: ...

    @abstractmethod
    def stream_of(self, ident: int) -> int: ...

    def release_oversize(self, size: int, stream: int) -> bool:
        return False

    def malloc(self, ident: int, size: int, stream: int) -> None:
        if size == 0:
            self.live[ident] = (0, set())
            return
        self.take_up()
        size = (size + 511) // 512 * 512
        taken = self.place(ident, size, stream, grow=False) or self.place(ident, size, stream, grow=True)
        if taken is None and self.release_oversize(size, stream):
            taken = self.place(ident, size, stream, grow=True)
        if taken is None:
            self.empty_cache()
            self.retries += 1
            taken = self.place(ident, size, stream, grow=True)
        if taken is None:
            self.ooms += 1
            raise DeviceOutOfMemory(size, 0, 0, 0)
        self.live[ident] = (taken, set())

    def free(self, ident: int) -> None:
        size, streams = self.live.pop(ident)
        if streams:
            self.waiting[ident] = streams
        elif size:
            self.vacate(ident)

    def record_stream(self, ident: int, stream: int) -> None:
        size, streams = self.live[ident]
        if size and stream != self.stream_of(ident):
            streams.add(stream)

    def synchronize(self, stream: int | None = None) -> None:
        for ident, streams in self.waiting.items():
            streams -= streams if stream is None else {stream}
            if not streams:
                self.done.add(ident)

    def take_up(self) -> None:
        for ident in self.done:
            self.vacate(ident)
            del self.waiting[ident]
        self.done = set()

    def empty_cache(self) -> None:
        self.synchronize()
        self.take_up()
        self.shrink()


class PlainReference(Reference):
    """Segments are lists of [bytes, name or None], in the order in which the device gave them."""

    def __init__(self, capacity: int | None, max_split: int | None) -> None:
        super().__init__(capacity, max_split)
        self.segments: list[tuple[int, bool, list[list[Any]]]] = []

    @property
    def reserved(self) -> int:
        return sum(size for _, _, cells in self.segments for size, _ in cells)

    def place(self, ident: int, size: int, stream: int, grow: bool) -> int | None:
        small = size <= MIB
        if grow:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            if self.reserved + segment > self.capacity:
                return None
            self.segments.append((stream, small, [[segment, None]]))
            cells, index = self.segments[-1][2], 0
        else:
            fitting = [
                (cell[0], number, index)
                for number, (owner, kind, cells) in enumerate(self.segments)
                for index, cell in enumerate(cells)
                if (owner, kind) == (stream, small) and cell[1] is None and cell[0] >= size
            ]
            if not fitting:
                return None
            found, number, index = min(fitting)
            if found >= self.max_split and (size < self.max_split or found >= size + 20 * MIB):
                return None
            cells = self.segments[number][2]
        rest = cells[index][0] - size
        if rest >= 512 if small else rest > MIB and size < self.max_split:
            cells[index : index + 1] = [[size, ident], [rest, None]]
        else:
            cells[index][1] = ident
        return next(int(held) for held, name in cells if name == ident)

    def vacate(self, ident: int) -> None:
        for _, _, cells in self.segments:
            merged: list[list[Any]] = []
            for size, name in cells:
                name = None if name == ident else name
                if merged and merged[-1][1] is None and name is None:
                    merged[-1][0] += size
                else:
                    merged.append([size, name])
            cells[:] = merged

    def shrink(self) -> None:
        self.segments = [kept for kept in self.segments if len(kept[2]) > 1 or kept[2][0][1] is not None]

    def stream_of(self, ident: int) -> int:
        return next(stream for stream, _, cells in self.segments if any(name == ident for _, name in cells))

    def release_oversize(self, size: int, stream: int) -> bool:
        def oversize() -> list[tuple[int, int]]:
            found = []
            for number, (owner, small, cells) in enumerate(self.segments):
                found += [
                    (cell[0], number) for cell in cells if (owner, small) == (stream, size <= MIB) and cell[1] is None
                ]
            return sorted(one for one in found if one[0] >= self.max_split)

        wanted = max(size, self.max_split)
        enough = [one for one in oversize() if one[0] >= wanted]
        if enough:
            del self.segments[enough[0][1]]
            return True
        released = 0
        while released < wanted and oversize():
            released += oversize()[-1][0]
            del self.segments[oversize()[-1][1]]
        return released >= wanted


class ExpandableReference(Reference):
    """For each stream and pool the places of what is in use and the numbers of the pages that are mapped."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity, None)
        self.places: dict[int, tuple[tuple[int, bool], int, int]] = {}  # name: pool, address, bytes
        self.pages: defaultdict[tuple[int, bool], set[int]] = defaultdict(set)

    @staticmethod
    def page(pool: tuple[int, bool]) -> int:
        return 2 * MIB if pool[1] else 20 * MIB

    @property
    def reserved(self) -> int:
        return sum(len(pages) * self.page(pool) for pool, pages in self.pages.items())

    def runs(self, pool: tuple[int, bool]) -> list[tuple[int, int, bool]]:
        """(begin, end, mapped) of what is free, in order; the last has no end worth mentioning."""
        found: list[tuple[int, int, bool]] = []
        page, begin = self.page(pool), 0
        used = sorted((address, address + size) for owner, address, size in self.places.values() if owner == pool)
        for end, after in [*used, ((max(self.pages[pool], default=-1) + 1) * page + 2**60, 0)]:
            while begin < end:
                mapped = begin // page in self.pages[pool]
                stop = min(end, (begin // page + 1) * page)
                if not mapped and begin // page > max(self.pages[pool], default=-1):
                    stop = end
                if found and found[-1][1:] == (begin, mapped):
                    found[-1] = (found[-1][0], stop, mapped)
                else:
                    found.append((begin, stop, mapped))
                begin = stop
            begin = max(begin, after)
        return found

    def place(self, ident: int, size: int, stream: int, grow: bool) -> int | None:
        pool = (stream, size <= MIB)
        runs = self.runs(pool)
        unmapped = {begin: end for begin, end, mapped in runs if not mapped}
        if not grow:
            fitting = sorted((end - begin, begin, end) for begin, end, mapped in runs if mapped and end - begin >= size)
            if not fitting:
                return None
            reach = [unmapped.get(end, end) - begin for _, begin, end in fitting]
            best = next((i for i in range(len(reach) - 1) if reach[i + 1] >= reach[i]), len(reach) - 1)
            self.places[ident] = (pool, fitting[best][1], size)
            return size
        for first in unmapped:
            start = next((begin for begin, end, mapped in runs if mapped and end == first), first)
            end = start
            for begin, stop, _ in runs:
                end = stop if begin == end else end
            if end - start >= size:
                break
        page = self.page(pool)
        for begin, stop, mapped in runs:
            if not mapped and begin < start + size and stop > start:
                needed = set(range(begin // page, -(-min(stop, start + size) // page)))
                if self.reserved + len(needed) * page > self.capacity:
                    return None
                self.pages[pool] |= needed
        self.places[ident] = (pool, start, size)
        return size

    def vacate(self, ident: int) -> None:
        del self.places[ident]

    def shrink(self) -> None:
        for pool, pages in self.pages.items():
            page = self.page(pool)
            used = [(address, size) for owner, address, size in self.places.values() if owner == pool]
            pages &= {
                number for address, size in used for number in range(address // page, -(-(address + size) // page))
            }

    def stream_of(self, ident: int) -> int:
        return self.places[ident][0][0]


def reference_for(capacity: int | None, settings: AllocatorSettings) -> Reference:
    if settings.expandable_segments:
        return ExpandableReference(capacity)
    return PlainReference(capacity, settings.max_split_size_bytes)
