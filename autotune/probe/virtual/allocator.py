"""A model of PyTorch's CUDA caching allocator: what a run's allocations reserve, and where they run out of memory.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.9 to 2.13 step by step, sizes and order included, for one
device without CUDA graphs and memory pools of the user's. Addresses are counted up from zero and never used twice;
they matter only where two free blocks are of one size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.probe.virtual.allocator_blocks import (
    CACHED,
    LARGE_SEGMENT,
    SIZE_SHIFT,
    SMALL_SEGMENT,
    UNMAPPED,
    USED,
    Block,
    Pool,
)

MIB = 1024 * 1024
MIN_BLOCK = 512  # bytes; every block is a multiple of it
SMALL_SIZE = MIB  # the largest request that goes to the small pool, and what a large block's remainder must exceed
LARGE_REQUEST = 10 * MIB  # from here on a request has a segment of its own size
LARGE_ROUNDING = 2 * MIB
OVERSIZE = LARGE_SEGMENT  # a block of at least max_split_size serves requests that are smaller by less than this
UNLIMITED = 1 << 62
ADDRESS_SPACE = LARGE_SEGMENT << 30  # of one expandable segment: a multiple of both page sizes, never used up


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF sets.

    Args:
        expandable_segments: one growing segment for each stream and pool, instead of one for each cudaMalloc.
        garbage_collection_threshold: share of the capacity above which unused segments are given back before another
            is asked for.
        max_split_size_bytes: blocks of at least this size (whole MiB, as the option counts) are never split.
    """

    expandable_segments: bool = False
    garbage_collection_threshold: float | None = None
    max_split_size_bytes: int | None = None

    @classmethod
    def parse(cls, conf: str) -> AllocatorSettings:
        """The settings that the text of PYTORCH_ALLOC_CONF gives.

        Raises:
            ValueError: an option that is not modelled, or a value that torch refuses.
        """
        expandable, threshold, max_split = False, None, None
        for part in filter(None, "".join(conf.split()).split(",")):
            name, _, value = part.partition(":")
            if name == "expandable_segments" and value in ("True", "False"):
                expandable = value == "True"
            elif name == "garbage_collection_threshold" and 0 < float(value) < 1:
                threshold = float(value)
            elif name == "max_split_size_mb" and int(value) * MIB >= LARGE_SEGMENT:
                max_split = int(value) * MIB
            else:
                raise ValueError(f"not an allocator setting that is modelled: {part}")
        return cls(expandable, threshold, max_split)


class DeviceOutOfMemory(Exception):
    """A request that does not fit, not even after everything unused was given back.

    Args:
        requested: the request, rounded to a block's size, bytes.
        segment: what cudaMalloc was asked for, bytes.
        allocated: in blocks at that moment, bytes.
        reserved: in segments at that moment, bytes.
    """

    def __init__(self, requested: int, segment: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{segment} bytes more do not fit: {allocated} allocated, {reserved} reserved")
        self.requested_bytes = requested
        self.segment_bytes = segment
        self.allocated_bytes = allocated
        self.reserved_bytes = reserved


class CachingAllocator:
    """The allocator of one device. It reads every size in bytes.

    Args:
        capacity: what may be reserved, bytes; None for any amount. It is the memory itself: an expandable segment may
            map pages up to it, where torch with a memory fraction set compares the whole request.
        settings: what PYTORCH_ALLOC_CONF would say.

    Attributes:
        allocated: in blocks that are in use, bytes, as torch.cuda.memory_allocated.
        reserved: in segments, bytes, as torch.cuda.memory_reserved.
        peak_allocated: the largest `allocated` so far, bytes.
        peak_reserved: the largest `reserved` so far, bytes.
        inactive_split: in free blocks of partly used segments, bytes. Zero with expandable segments, as in torch.
        retries: how often everything unused was given back because a request did not fit (num_alloc_retries).
        ooms: how often a request did not fit even then.
    """

    def __init__(self, capacity: int | None = None, settings: AllocatorSettings = AllocatorSettings()) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.inactive_split = self.retries = self.ooms = 0
        self._capacity = UNLIMITED if capacity is None else capacity
        self._expandable = settings.expandable_segments
        self._max_split = settings.max_split_size_bytes or UNLIMITED
        # Expandable segments are never collected, and without a capacity there is nothing to take a share of.
        collecting = capacity is not None and not self._expandable
        self._threshold = settings.garbage_collection_threshold if collecting else None
        self._lookups = 0  # in the large pools: the clock by which garbage collection tells a block's age
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._live: dict[int, Block | None] = {}
        self._pending: dict[int, list[Block]] = {}  # freed blocks by the stream whose event they wait for
        self._finished: list[Block] = []  # the same, once for each event that is done
        self._top = 0  # where the next segment begins

    def malloc(self, ident: int, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes for `stream`, to be known as `ident` until they are freed.

        Raises:
            DeviceOutOfMemory: they do not fit. What can be given back has been, and nothing else has changed.
        """
        if ident in self._live:
            raise ValueError(f"block {ident} is still allocated")
        if size <= 0:
            self._live[ident] = None
            return
        if self._finished:
            self._take_up()
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        pool = self._pools.get((stream, size <= SMALL_SIZE)) or self._new_pool(stream, size <= SMALL_SIZE)
        block = self._cached(pool, size) or self._new_segment(pool, size)
        rest = block.size - size
        shares = block.previous is not None or block.next is not None
        if rest and (pool.fine or (rest > SMALL_SIZE and size < self._max_split)):
            remainder = block  # the upper part remains the block that its neighbours know
            block = Block(pool, remainder.address, size)
            before = block.previous = remainder.previous
            if before is not None:
                before.next = block
            block.next = remainder
            remainder.previous = block
            remainder.address += size
            remainder.size = rest
            self._cache(remainder)
            if not self._expandable:
                self.inactive_split += -size if shares else rest
        elif shares and not self._expandable:
            self.inactive_split -= block.size
        block.state = USED
        self._live[ident] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, ident: int) -> None:
        """Free a block: at once, or when the streams that were recorded on it have done their work."""
        block = self._live.pop(ident)
        if block is None:
            return
        self.allocated -= block.size
        if not block.streams:
            self._put_back(block)
            return
        block.events = len(block.streams)
        for stream in block.streams:
            self._pending.setdefault(stream, []).append(block)
        block.streams = None

    def record_stream(self, ident: int, stream: int) -> None:
        """Note that `stream` uses the block. The stream that it was allocated for is ordered anyway."""
        block = self._live[ident]
        if block is not None and stream != block.pool.stream:
            block.streams = (block.streams or set()) | {stream}

    def synchronize(self, stream: int | None = None) -> None:
        """The work that `stream` has been given so far is done (None: on every stream).

        The allocator sees no kernels, so a stream counts as busy from a free until it is named here. As in torch the
        blocks are taken up at the next malloc.
        """
        for done in list(self._pending) if stream is None else [stream]:
            self._finished += self._pending.pop(done, [])

    def empty_cache(self) -> None:
        """Wait for every stream, then give back what no block uses."""
        self.synchronize()
        self._take_up()
        for pool in self._pools.values():
            if self._expandable:
                for block in list(pool.blocks.values()):
                    self._unmap(block)
            else:
                self._release(block for block in list(pool.blocks.values()) if block.is_segment)

    def reset_peaks(self) -> None:
        """Let both peaks start again from what there is now, as torch.cuda.reset_peak_memory_stats does."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def _new_pool(self, stream: int, small: bool) -> Pool:
        pool = self._pools[stream, small] = Pool(stream, small, self._expandable)
        return pool

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Take the best free block out of the pool: the smallest that fits, of those the one at the lowest address."""
        if self._threshold is not None and not pool.small:
            self._lookups += 1
        keys = pool.keys
        index = bisect_left(keys, size << SIZE_SHIFT)
        if index == len(keys):
            return None
        block = pool.blocks[keys[index]]
        if self._expandable:
            # A block before unmapped pages counts with them, so that the end of the segment is the last resort.
            reach = block.reach
            while index + 1 < len(keys):
                block_above = pool.blocks[keys[index + 1]]
                reach_above = block_above.reach
                if reach_above >= reach:
                    break
                index, block, reach = index + 1, block_above, reach_above
        max_split = self._max_split
        if block.size >= max_split and (size < max_split or block.size >= size + OVERSIZE):
            return None
        del pool.blocks[keys.pop(index)]
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """A block that the device gives, in torch's order of attempts.

        Raises:
            DeviceOutOfMemory: the last of them has failed.
        """
        if size <= SMALL_SIZE:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        if self._threshold is not None:
            self._collect_garbage(int(self._threshold * self._capacity))
        block = self._grow(pool, size) if self._expandable else self._cuda_malloc(pool, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._cuda_malloc(pool, segment)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size) if self._expandable else self._cuda_malloc(pool, segment)
        if block is None:
            self.ooms += 1
            raise DeviceOutOfMemory(size, segment, self.allocated, self.reserved)
        return block

    def _cuda_malloc(self, pool: Pool, size: int) -> Block | None:
        if not self._reserve(size):
            return None
        block = Block(pool, self._top, size)
        self._top += size
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _collect_garbage(self, limit: int) -> None:
        """Give back whole segments, those that no request has wanted for longest first, down to `limit` bytes."""
        surplus = self.reserved - limit
        idle = [
            block
            for (_, small), pool in self._pools.items()
            if not small
            for block in pool.blocks.values()
            if block.is_segment
        ]
        while surplus > 0 and idle:
            mean = sum(self._lookups - block.cached_at for block in idle) / len(idle)
            old = [block for block in idle if self._lookups - block.cached_at >= mean]
            idle = [block for block in idle if self._lookups - block.cached_at < mean]
            surplus -= self._release(old)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back blocks that max_split_size keeps from being split, until they make up for `size` bytes.

        Returns:
            Whether they do.
        """
        if self._max_split == UNLIMITED or self._expandable:
            return False
        index = bisect_left(pool.keys, size << SIZE_SHIFT)
        if index < len(pool.keys):
            return self._release([pool.blocks[pool.keys[index]]]) > 0
        released = 0
        while released < size and pool.keys and pool.blocks[pool.keys[-1]].size >= self._max_split:
            released += self._release([pool.blocks[pool.keys[-1]]])
        return released >= size

    def _release(self, segments: Iterable[Block]) -> int:
        """Give whole segments back to the device; returns their bytes."""
        released = 0
        for block in segments:
            block.pool.remove(block)
            released += block.size
        self.reserved -= released
        return released

    def _take_up(self) -> None:
        """Put back the blocks whose last event is done."""
        finished, self._finished = self._finished, []
        for block in finished:
            block.events -= 1
            if not block.events:
                self._put_back(block)

    def _put_back(self, block: Block) -> None:
        """Make a block free, one with its free neighbours."""
        size = block.size
        block.state = CACHED
        block.merge()
        self._cache(block)
        if not self._expandable:
            self.inactive_split -= block.size - size
            if not block.is_segment:
                self.inactive_split += block.size

    def _cache(self, block: Block) -> None:
        block.state = CACHED
        block.cached_at = self._lookups
        block.pool.add(block)

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` bytes at the lowest address of the pool's expandable segment that has room."""
        if not pool.unmapped:
            block = Block(pool, 0, ADDRESS_SPACE)
            block.state = UNMAPPED
            pool.unmapped.append(block)
        block = next(start for start in map(Block.run_start, pool.unmapped) if start.has_room(size))
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            above = block.next
            assert above is not None  # has_room has seen it
            if not self._map(above, min(size - block.size, above.size)):
                return None  # what has been mapped so far stays in the pool
            block = above
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the first `size` bytes of an unmapped block with pages; it then takes in its free neighbours."""
        pool = block.pool
        mapped = -(-size // pool.page) * pool.page
        if not self._reserve(mapped):
            return False
        pool.unmapped.remove(block)
        if mapped < block.size:
            pool.add_unmapped(block.cut_after(mapped))
        block.state = CACHED
        block.merge()
        self._cache(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that a free block covers whole."""
        pool = block.pool
        begin = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        if block.address + block.size > end:
            self._cache(block.cut_after(end - block.address))
        if block.address < begin:
            below, block = block, block.cut_after(begin - block.address)
            self._cache(below)
        self.reserved -= end - begin
        block.state = UNMAPPED
        block.merge()
        pool.add_unmapped(block)
