"""torch's caching allocator, replayed on a list of allocations: how much of the device a step *reserves*.

The rules are those of the CUDA allocator of torch 2.13 with its default settings, one after the other:

    size      up to a multiple of 512 bytes
    pool      at most 1 MiB: small; else large. Blocks never move between pools, nor between streams
    take      the smallest free block of the pool that is large enough; of equal ones that with the lowest address
    else      a new segment: small 2 MiB; large below 10 MiB 20 MiB; else the size up to a multiple of 2 MiB
    split     what remains of a block becomes one of its own: small pool from 512 bytes on, large pool above 1 MiB
    free      a block merges with free neighbours of its segment; the segment stays reserved
    full      a segment that does not fit: all wholly free segments are given back, once, then it is out of memory

With expandable segments a pool is one segment a stream that grows at its end by pages (small 2 MiB, large 20 MiB).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from evener.plan.values import Alloc, Event, Free

MIB = 1 << 20
_ROUND = 512
_SMALL = MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE_FROM = 2 * MIB, 20 * MIB, 10 * MIB


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the replay found: torch's `max_memory_allocated` and `max_memory_reserved`, and the index of the event that
    found no memory even when everything free was given back, or None."""

    allocated_bytes: int
    reserved_bytes: int
    failed_at: int | None = None


class Block:
    __slots__ = ("address", "before", "behind", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: Block | None = None
        self.behind: Block | None = None
        self.free = False

    @property
    def whole(self) -> bool:
        return self.before is None and self.behind is None


@dataclass
class Pool:
    """Free blocks of one size class on one stream, as (size, address), and the end of its expandable segment."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    last: Block | None = None  # expandable: the block at the end of what is mapped


class Allocator:
    """The allocator's state. `capacity`: bytes that segments may take together; None: endless. An expandable segment
    gives nothing back here."""

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.pools: dict[tuple[str, bool], Pool] = {}
        self.blocks: dict[int, Block] = {}  # free ones, by address
        self.end = self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def alloc(self, size: int, stream: str = "") -> Block:
        """A block of at least `size` bytes. Raises MemoryError where the capacity is not enough."""
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = self.pools.setdefault((stream, small), Pool(small))
        at = bisect_left(pool.free, (size, 0))
        if at < len(pool.free):
            block = self.blocks.pop(pool.free.pop(at)[1])
        else:
            block = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        block.free = False
        rest = block.size - size
        if rest >= _ROUND if small or self.expandable else rest > _SMALL:
            tail = Block(block.address + size, rest, pool)
            tail.before, tail.behind, block.behind = block, block.behind, tail
            if tail.behind is not None:
                tail.behind.before = tail
            block.size = size
            if pool.last is block:
                pool.last = tail
            self._keep(tail)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        pool = block.pool
        for other in (block.before, block.behind):
            if other is not None and other.free:
                self._drop(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.behind = second.behind
                if first.behind is not None:
                    first.behind.before = first
                if pool.last is second:
                    pool.last = first
                block = first
        self._keep(block)

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(block.pool.free, (block.size, block.address))
        self.blocks[block.address] = block

    def _drop(self, block: Block) -> None:
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]
        del self.blocks[block.address]
        block.free = False

    def _reserve(self, size: int) -> None:
        if self.capacity is not None and self.reserved + size > self.capacity:
            for block in [one for one in self.blocks.values() if one.whole and one.pool.last is None]:
                self._drop(block)
                self.reserved -= block.size
            if self.reserved + size > self.capacity:
                raise MemoryError(size)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _segment(self, pool: Pool, size: int) -> Block:
        rounded = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        total = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT if size < _LARGE_FROM else rounded
        self._reserve(total)
        block = Block(self.end, total, pool)
        self.end += total + 1  # never neighbours
        return block

    def _grow(self, pool: Pool, size: int) -> Block:
        page, last = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT, pool.last
        have = last.size if last is not None and last.free else 0
        total = -(-(size - have) // page) * page
        self._reserve(total)
        if last is None:
            pool.last = Block(self.end, total, pool)
            self.end += 1 << 48
        elif last.free:
            self._drop(last)
            last.size += total
        else:
            pool.last = last.behind = Block(last.address + last.size, total, pool)
            pool.last.before = last
        assert pool.last is not None
        return pool.last


def replay(
    events: Iterable[Event], *, expandable: bool = False, capacity: int | None = None, workspaces: Iterable[int] = ()
) -> Reserved:
    """The allocations and frees of `events` in their order. `workspaces`: bytes that are taken first and stay.

    What collectives read and write comes from a stream, and so pools, of their own. With a capacity the replay stops at
    the first allocation that does not fit.
    """
    allocator = Allocator(expandable=expandable, capacity=capacity)
    blocks: dict[int, Block] = {}
    failed: int | None = -1
    try:
        for size in workspaces:
            allocator.alloc(size)
        for index, one in enumerate(events):
            failed = index
            if isinstance(one, Alloc) and one.bytes > 0:
                blocks[one.id] = allocator.alloc(one.bytes, one.category if one.category == "communication" else "")
            elif isinstance(one, Free) and one.id in blocks:
                allocator.free(blocks.pop(one.id))
        failed = None
    except MemoryError:
        pass
    return Reserved(allocator.peak_allocated, allocator.peak_reserved, failed)
