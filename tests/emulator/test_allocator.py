"""The device's allocator: sizes, reuse, and books that balance."""

from __future__ import annotations

import ctypes
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmstream.emulator.allocator import Block, CapacityError, segment_bytes
from fmstream.emulator.machine import Machine
from fmstream.emulator.reserve import Reserve
from tests.kit_machine import MIB, kernel, machine, span


def offsets(on: Machine, *blocks: Block) -> list[int]:
    """Where blocks lie in the device."""
    return [block.address - on.allocator.address for block in blocks]


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_are_of_the_sizes_of_cuda(size: int, taken: int) -> None:
    assert segment_bytes(size) == taken
    on = machine()
    block = on.allocator.allocate(size, 0)
    assert block.nbytes == size <= block.size
    assert on.allocator.statistics().reserved == taken
    on.allocator.check()


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 512), (1, 512), (512, 512), (513, 1024), (5 * MIB + 1, 5 * MIB + 512)]
)
def test_sizes_are_rounded_to_512_bytes(asked: int, given: int) -> None:
    on = machine()
    block = on.allocator.allocate(asked, 0)
    assert (block.nbytes, block.size) == (asked, given)
    assert on.allocator.statistics().allocated == given


def test_a_segment_of_its_own_is_not_divided_for_a_small_rest() -> None:
    on = machine()
    assert on.allocator.allocate(11 * MIB, 0).size == 12 * MIB  # a rest of 1 MiB is not worth it
    assert on.allocator.allocate(19 * MIB - 512, 0).size == 20 * MIB - 512 - MIB  # a greater one is
    on.allocator.check()


def test_blocks_are_divided_and_joined_again() -> None:
    on = machine()
    give = on.allocator
    first, second, third = (give.allocate(512 * 1024, 0) for _ in range(3))
    assert offsets(on, first, second, third) == [0, 512 * 1024, MIB]
    give.free(first)
    give.free(third)
    give.check()
    give.free(second)
    give.check()
    whole = give.allocate(MIB, 0)
    assert offsets(on, whole) == [0]
    assert give.statistics().reserved == 2 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    on = machine()
    give = on.allocator
    sizes = [8 * MIB, 2 * MIB, 4 * MIB, 2 * MIB, 3 * MIB]
    blocks = [give.allocate(size, 0) for size in sizes]
    wide, narrow = blocks[0], blocks[2]
    give.free(wide)
    give.free(narrow)
    assert give.allocate(4 * MIB, 0).address == narrow.address
    assert give.allocate(4 * MIB, 0).address == wide.address
    give.check()


def test_streams_and_sizes_have_pools_of_their_own() -> None:
    on = machine()
    side = on.new_stream()
    block = on.allocator.allocate(4096, 0)
    on.allocator.free(block)
    assert on.allocator.allocate(4096, side).address != block.address
    assert on.allocator.allocate(2 * MIB, 0).address != block.address
    assert on.allocator.allocate(4096, 0).address == block.address
    assert on.allocator.statistics().reserved == 2 * MIB + 2 * MIB + 20 * MIB


def test_a_block_that_another_stream_uses_serves_again_when_that_has_passed() -> None:
    on = machine()
    side = on.new_stream()
    block = on.allocator.allocate(4 * MIB, 0)
    kernel(on, side, reads=(span(block),), seconds=2.0)
    on.allocator.record_stream(block, side)
    on.allocator.free(block)
    assert on.allocator.statistics().allocated == 0
    other = on.allocator.allocate(4 * MIB, 0)
    assert other.address != block.address
    on.allocator.check()
    on.charge(2.0)
    assert on.allocator.allocate(4 * MIB, 0).address == block.address
    on.allocator.check()


def test_only_work_before_the_free_is_waited_for() -> None:
    on = machine()
    side = on.new_stream()
    block = on.allocator.allocate(4 * MIB, 0)
    kernel(on, side, reads=(span(block),), seconds=1.0)
    on.allocator.record_stream(block, side)
    on.allocator.free(block)
    kernel(on, side, seconds=50.0)
    on.charge(1.0)
    assert on.allocator.allocate(4 * MIB, 0).address == block.address


def test_recording_the_own_stream_delays_nothing() -> None:
    on = machine()
    block = on.allocator.allocate(4096, 0)
    kernel(on, reads=(span(block),))
    on.allocator.record_stream(block, 0)
    on.allocator.free(block)
    assert on.allocator.allocate(4096, 0).address == block.address


def test_deferred_work_on_a_recorded_block_is_done_before_it_serves_again() -> None:
    on = machine(execution="late")
    side = on.new_stream()
    done: list[str] = []
    block = on.allocator.allocate(4096, 0)
    kernel(on, side, reads=(span(block),), run=lambda: done.append("read"))
    on.allocator.record_stream(block, side)
    on.allocator.free(block)
    on.charge(1.0)
    assert done == []
    assert on.allocator.allocate(4096, 0).address == block.address
    assert done == ["read"]


def test_memory_runs_out_at_the_capacity() -> None:
    on = machine(capacity=40 * MIB)
    blocks = [on.allocator.allocate(20 * MIB, 0) for _ in range(2)]
    with pytest.raises(CapacityError, match=rf"{MIB} bytes asked for, {40 * MIB} allocated .* of {40 * MIB}; free"):
        on.allocator.allocate(MIB, 0)
    on.allocator.check()
    found = on.allocator.statistics()
    assert (found.num_ooms, found.num_retries, found.peak_reserved) == (1, 1, 40 * MIB)
    on.allocator.free(blocks[0])
    on.allocator.allocate(20 * MIB, 0)
    assert on.statistics().num_ooms == 1


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    on = machine(capacity=40 * MIB)
    kept = on.allocator.allocate(4096, 0)
    on.allocator.free(on.allocator.allocate(30 * MIB, 0))
    assert on.allocator.statistics().reserved == 32 * MIB
    kernel(on, seconds=3.0)
    on.allocator.allocate(34 * MIB, 0)
    found = on.allocator.statistics()
    assert (found.reserved, found.num_retries, found.num_ooms) == (36 * MIB, 1, 0)
    assert on.now == 3.0  # as cudaFree, it waits for the device
    on.allocator.free(kept)
    on.allocator.check()


def test_memory_that_another_stream_uses_is_waited_for_before_it_runs_out() -> None:
    on = machine(capacity=40 * MIB)
    side = on.new_stream()
    block = on.allocator.allocate(40 * MIB, 0)
    kernel(on, side, reads=(span(block),), seconds=2.0)
    on.allocator.record_stream(block, side)
    on.allocator.free(block)
    on.allocator.allocate(30 * MIB, side)
    assert on.now == 2.0
    on.allocator.check()


def test_emptying_the_cache_keeps_segments_that_are_in_use() -> None:
    on = machine()
    give = on.allocator
    gone, kept = give.allocate(4096, 0), give.allocate(4096, 0)
    large = give.allocate(20 * MIB, 0)
    give.free(gone)
    give.free(large)
    give.empty_cache()
    assert give.statistics().reserved == 2 * MIB
    assert give.block_at(kept.address) is kept
    assert give.block_at(large.address) is None
    give.free(kept)
    give.empty_cache()
    assert give.statistics().reserved == 0
    assert on.now == 0.0
    give.check()


def test_peaks_count_from_the_reset() -> None:
    on = machine()
    block = on.allocator.allocate(20 * MIB, 0)
    on.allocator.free(block)
    assert on.allocator.statistics().peak_allocated == 20 * MIB
    on.reset_statistics()
    assert on.statistics().peak_allocated == 0
    assert on.statistics().peak_reserved == 20 * MIB
    on.allocator.allocate(512, 0)
    assert on.statistics().peak_allocated == 512


def test_a_free_amid_an_allocation_waits_for_its_end() -> None:
    """As a finalizer may, that the garbage collector runs at any point."""
    on = machine()
    blocks = [on.allocator.allocate(4096, 0) for _ in range(3)]
    kernel(on, run=lambda: on.allocator.free(blocks[1]))
    assert blocks[1].allocated
    assert on.allocator.statistics().allocated == 2 * 4096
    on.allocator.check()
    assert not blocks[1].allocated


def test_a_block_may_be_freed_by_another_thread() -> None:
    on = machine()
    block = on.allocator.allocate(4096, 0)
    thread = threading.Thread(target=on.allocator.free, args=(block,))
    thread.start()
    thread.join()
    assert on.allocator.statistics().allocated == 0


def test_threads_share_the_books() -> None:
    on = machine()

    def work(seed: int) -> None:
        choose = random.Random(seed)
        mine: list[Block] = []
        for _ in range(300):
            if mine and choose.random() < 0.5:
                on.allocator.free(mine.pop(choose.randrange(len(mine))))
            else:
                mine.append(on.allocator.allocate(choose.choice([100, 5000, 100_000]), seed % 2))
        for block in mine:
            on.allocator.free(block)

    on.new_stream()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    on.allocator.check()
    assert on.allocator.statistics().allocated == 0


SIZES = [1, 512, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 12 * MIB]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "take", "free", "free", "use", "pass", "empty"]),
            st.integers(0, 10**6),
        ),
        max_size=60,
    )
)
def test_books_balance_whatever_is_done(deeds: list[tuple[str, int]]) -> None:
    on = machine(capacity=48 * MIB, execution="late")
    streams = [0, on.new_stream()]
    held: list[Block] = []
    for deed, number in deeds:
        if deed == "take":
            try:
                held.append(on.allocator.allocate(SIZES[number % len(SIZES)], streams[number % 2]))
            except CapacityError:
                on.allocator.check()
        elif deed == "free" and held:
            on.allocator.free(held.pop(number % len(held)))
        elif deed == "use" and held:
            block = held[number % len(held)]
            on.allocator.record_stream(block, 1 - block.stream)
            kernel(on, 1 - block.stream, seconds=float(number % 3))
        elif deed == "pass":
            on.charge(float(number % 3))
        elif deed == "empty":
            on.allocator.empty_cache()
        on.allocator.check()
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
        assert on.allocator.statistics().allocated == sum(block.size for block in held)
    for block in held:
        on.allocator.free(block)
    on.allocator.empty_cache()
    on.allocator.check()
    assert on.allocator.statistics().reserved == 0


def test_two_runs_place_blocks_alike() -> None:
    def run() -> list[int]:
        on = machine()
        choose, found = random.Random(4), list[int]()
        held: list[Block] = []
        for _ in range(200):
            if held and choose.random() < 0.5:
                on.allocator.free(held.pop(choose.randrange(len(held))))
            else:
                held.append(on.allocator.allocate(choose.randrange(1, 300_000), 0))
                found += offsets(on, held[-1])
        return found

    assert run() == run()


def fill(block: Block, value: int) -> None:
    """Write bytes, as a kernel would."""
    ctypes.memset(block.address, value, block.nbytes)


def bytes_of(block: Block) -> set[int]:
    """The values of a block's bytes."""
    return set(ctypes.string_at(block.address, block.nbytes))


def test_blocks_hold_bytes() -> None:
    on = machine()
    one, two = on.allocator.allocate(100_000, 0), on.allocator.allocate(30 * MIB, 0)
    fill(one, 1)
    fill(two, 2)
    assert (bytes_of(one), bytes_of(two)) == ({1}, {2})


@pytest.mark.parametrize("execution", ["eager", "late", 3])
def test_poison_spoils_what_is_free_in_the_order_of_its_stream(execution: object) -> None:
    on = machine(execution=execution, poison=True)
    block = on.allocator.allocate(4096, 0)
    on.synchronize()
    assert bytes_of(block) == {0xFF}
    kernel(on, run=lambda: fill(block, 1))
    seen: list[set[int]] = []
    kernel(on, run=lambda: seen.append(bytes_of(block)))
    on.allocator.free(block)
    again = on.allocator.allocate(4096, 0)
    assert again.address == block.address
    kernel(on, run=lambda: seen.append(bytes_of(again)))
    on.synchronize()
    assert seen == [{1}, {0xFF}]


def rights_at(address: int) -> str:
    """What may be done to the memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, rights = line.split()[:2]
        low, high = (int(end, 16) for end in ends.split("-"))
        if low <= address < high:
            return rights
    raise AssertionError("nothing is mapped there")


def test_in_a_dry_run_small_blocks_alone_hold_bytes() -> None:
    on = machine(execution="dry")
    small, large = on.allocator.allocate(MIB, 0), on.allocator.allocate(2 * MIB, 0)
    fill(small, 1)
    assert bytes_of(small) == {1}
    assert (rights_at(small.address), rights_at(large.address)) == ("rw-p", "---p")
    on.allocator.free(small)
    on.allocator.empty_cache()
    assert rights_at(small.address) == "---p"
    again = on.allocator.allocate(MIB, 0)
    assert bytes_of(again) == {0}


def test_addresses_are_found_again_after_holes() -> None:
    reserve = Reserve(1 << 20, usable=True)
    taken = [reserve.take(1 << 18) for _ in range(4)]
    assert taken == [reserve.base + (i << 18) for i in range(4)]
    assert reserve.take(4096) is None
    for i in (2, 0, 1):
        address = taken[i]
        assert address is not None
        reserve.give(address, 1 << 18)
    assert reserve.take(3 << 18) == reserve.base


def test_addresses_are_unmapped_with_their_owner() -> None:
    reserve = Reserve(1 << 30, usable=True)
    base = reserve.base
    assert rights_at(base) == "rw-p"
    del reserve
    with pytest.raises(AssertionError, match="nothing is mapped"):
        rights_at(base)


def test_a_device_larger_than_the_address_space_is_refused() -> None:
    with pytest.raises(OSError, match="no address space"):
        Reserve(1 << 50, usable=False)
