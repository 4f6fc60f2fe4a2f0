"""The replayed allocator does what torch's caching allocator is known to do, and never loses or doubles a byte."""

from __future__ import annotations

import itertools
import random

import pytest

from evener.plan.allocator import MIB, Allocator, replay
from evener.plan.values import Alloc, Free


def alloc(id: int, size: int, category: str = "activation") -> Alloc:
    return Alloc(id, size, category, "", "forward")


def free(id: int) -> Free:
    return Free(id, "forward")


def test_a_published_snapshot_of_a_small_segment():
    # pytorch forum thread 178671: four tensors of 40000, 40, 4000 and 40 bytes, the third rounded to 4096
    allocator = Allocator()
    sizes = [allocator.alloc(size).size for size in (40000, 40, 4000, 40)]
    assert sizes == [40448, 512, 4096, 512]
    assert allocator.reserved == 2097152
    assert [size for pool in allocator.pools.values() for size, _ in pool.free] == [2097152 - 45568]


def test_the_workspace_of_cublas_in_the_same_snapshot_takes_a_segment_of_20_mib():
    allocator = Allocator()
    assert allocator.alloc(8519680).size == 8519680
    assert allocator.reserved == 20971520
    assert [size for pool in allocator.pools.values() for size, _ in pool.free] == [12451840]


@pytest.mark.parametrize(
    "size, block, segment",
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB - 100, 22 * MIB, 22 * MIB),  # the rest would be about 1 MiB: too little to be split off
        (23 * MIB + 1, 24 * MIB, 24 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(size, block, segment):
    allocator = Allocator()
    got = allocator.alloc(size)
    assert (got.size, allocator.reserved) == (block, segment)


def test_a_freed_block_is_used_again_and_a_smaller_one_is_split_off():
    allocator = Allocator()
    first = allocator.alloc(40 * MIB)
    allocator.free(first)
    again = allocator.alloc(30 * MIB)
    assert again.address == first.address
    assert allocator.alloc(10 * MIB).address == first.address + 30 * MIB
    assert allocator.reserved == 40 * MIB


def test_fragments_of_two_segments_do_not_add_up():
    events = [alloc(0, 12 * MIB), alloc(1, 12 * MIB), free(0), free(1), alloc(2, 24 * MIB)]
    assert replay(events).reserved_bytes == 48 * MIB
    assert replay(events).allocated_bytes == 24 * MIB
    # one segment that grows by pages of 20 MiB has no such border
    assert replay(events, expandable=True).reserved_bytes == 40 * MIB
    # with too little memory for a third segment the free ones are given back first
    short = replay(events, capacity=32 * MIB)
    assert (short.reserved_bytes, short.failed_at) == (24 * MIB, None)
    assert replay(events, capacity=20 * MIB).failed_at == 1


def test_another_stream_does_not_take_what_this_one_has_freed():
    events = [alloc(0, 16 * MIB), free(0), alloc(1, 16 * MIB, "communication")]
    assert replay(events).reserved_bytes == 32 * MIB
    assert replay(events).allocated_bytes == 16 * MIB


@pytest.mark.parametrize("expandable, capacity", [(False, None), (False, 600 * MIB), (True, None), (True, 600 * MIB)])
def test_no_byte_is_lost_or_given_twice(test_seed, expandable, capacity):
    draw = random.Random(test_seed)
    for _ in range(20):
        allocator = Allocator(expandable=expandable, capacity=capacity)
        live: dict[int, tuple[int, int]] = {}
        blocks = {}
        for step in range(300):
            if live and draw.random() < 0.45:
                id = draw.choice(list(live))
                del live[id]
                allocator.free(blocks.pop(id))
            else:
                size = int(2 ** draw.uniform(0, 26))
                try:
                    block = allocator.alloc(size, draw.choice(["", "communication"]))
                except MemoryError:
                    continue
                assert size <= block.size
                blocks[step], live[step] = block, (block.address, block.size)
            ranges = sorted([*live.values(), *((b.address, b.size) for b in allocator.blocks.values())])
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges)), "two blocks overlap"
            assert sum(n for _, n in ranges) == allocator.reserved, "a byte is neither free nor in use"
            assert allocator.allocated == sum(n for _, n in live.values()) <= allocator.reserved
            assert capacity is None or allocator.reserved <= capacity
        for block in blocks.values():
            allocator.free(block)
        assert allocator.allocated == 0
        if not expandable:
            assert all(block.whole for block in allocator.blocks.values()), "free neighbours were not merged"


def test_order_of_what_fits_does_not_change_the_rounded_peak(test_seed):
    draw = random.Random(test_seed)
    sizes = [draw.randrange(1, 30 * MIB) for _ in range(50)]
    rounded = sum(-(-size // 512) * 512 for size in sizes)
    for _ in range(5):
        draw.shuffle(sizes)
        found = replay([alloc(i, size) for i, size in enumerate(sizes)])
        assert rounded <= found.allocated_bytes <= rounded + len(sizes) * MIB  # blocks that were not worth splitting
        assert found.allocated_bytes <= found.reserved_bytes
