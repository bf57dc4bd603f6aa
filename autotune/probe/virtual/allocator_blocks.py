"""The blocks and pools of the modelled allocator (allocator.py): how segments are cut up, merged and searched."""

from __future__ import annotations

from bisect import bisect_left, insort

SMALL_SEGMENT = 2 * 1024 * 1024  # bytes; requests of up to half of it share one
LARGE_SEGMENT = 20 * 1024 * 1024
SIZE_SHIFT = 64  # a free block's key is its size above its address: sorted as the allocator sorts

USED, CACHED, UNMAPPED = range(3)  # states of a block; a freed one that other streams still read is USED


class Block:
    """A piece of a segment, with its neighbours there."""

    __slots__ = ("address", "cached_at", "events", "next", "pool", "previous", "size", "state", "streams")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.state = USED
        self.previous: Block | None = None
        self.next: Block | None = None
        self.streams: set[int] | None = None  # others than the pool's that use it
        self.events = 0  # for how many of them a freed block still waits
        self.cached_at = 0  # the count of lookups when it became free

    @property
    def is_segment(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    @property
    def reach(self) -> int:
        """Its size with that of the unmapped pages that follow it, bytes."""
        after = self.next
        return self.size + (after.size if after is not None and after.state == UNMAPPED else 0)

    def run_start(self) -> Block:
        """The free block just before an unmapped one, else itself."""
        before = self.previous
        return self if before is None or before.state == USED else before

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes follow from here that are free, mapped or not."""
        block: Block | None = self
        while size > 0 and block is not None and block.state != USED:
            size -= block.size
            block = block.next
        return size <= 0

    def merge(self) -> None:
        """Take in the neighbours of the same state, which must not be USED."""
        before, after, state = self.previous, self.next, self.state
        if before is not None and before.state == state:
            before.pool.remove(before)
            self.address = before.address
            self.size += before.size
            self.previous = before.previous
            if self.previous is not None:
                self.previous.next = self
        if after is not None and after.state == state:
            after.pool.remove(after)
            self.size += after.size
            self.next = after.next
            if self.next is not None:
                self.next.previous = self

    def cut_after(self, size: int) -> Block:
        """Keep `size` bytes; the rest becomes a block of the same state, which no pool knows yet."""
        rest = Block(self.pool, self.address + size, self.size - size)
        rest.state = self.state
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest


class Pool:
    """The free blocks of one stream, small or large."""

    __slots__ = ("blocks", "fine", "keys", "page", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool) -> None:
        self.stream = stream
        self.small = small
        self.fine = small or expandable  # blocks are split down to MIN_BLOCK
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT  # what an expandable segment grows by, bytes
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # by address; the last is the end of the address space

    def add(self, block: Block) -> None:
        """Let a block of the state CACHED be found."""
        key = block.size << SIZE_SHIFT | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Forget a block of the state CACHED or UNMAPPED."""
        if block.state == UNMAPPED:
            self.unmapped.remove(block)
            return
        key = block.size << SIZE_SHIFT | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]

    def add_unmapped(self, block: Block) -> None:
        """Let a block of the state UNMAPPED be found."""
        insort(self.unmapped, block, key=lambda other: other.address)
