"""Following a plan, on both cores."""

import pytest

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    LifetimePlan,
    OutOfMemoryError,
    TwoPoolAllocator,
    check_snapshot,
)
from gpu_alloc.errors import AllocTypeError, AllocValueError
from gpu_alloc.plan import PlanUse
from gpu_alloc.sources import PagedAddressSource

pytestmark = pytest.mark.usefixtures("each_core")
MIB = 1 << 20
PLAN = LifetimePlan(
    places=((2 * MIB, 0, 0), (2 * MIB, 0, 2 * MIB), (3 * MIB, 5, 4 * MIB)), alignment_size=512
)


def made(capacity_mb: int = 40) -> tuple[TwoPoolAllocator, int]:
    """An allocator that follows PLAN, and where the plan's range is."""
    allocator = TwoPoolAllocator(AddressSource(capacity_mb * MIB), on_exhausted=lambda: None)
    allocator.follow(PLAN)
    (chunk,) = allocator.snapshot().chunks
    assert (chunk.pool, chunk.size) == ("planned", 8 * MIB)
    return allocator, chunk.ptr


def test_requests_go_where_the_plan_says_step_after_step() -> None:
    allocator, start = made()
    for _ in range(3):
        allocator.begin_step()
        ptrs = [allocator.malloc(2 * MIB).ptr, allocator.malloc(2 * MIB - 100).ptr]
        ptrs.append(allocator.malloc(3 * MIB, 5).ptr)
        assert ptrs == [start, start + 2 * MIB, start + 4 * MIB]
        for ptr in ptrs:
            allocator.free(ptr)
    assert allocator.plan_use() == PlanUse(True, 9, 0)


def test_what_differs_is_placed_elsewhere_and_the_plan_goes_on() -> None:
    allocator, start = made()
    other = [allocator.malloc(3 * MIB).ptr, allocator.malloc(2 * MIB, 5).ptr]
    assert all(not start <= ptr < start + 8 * MIB for ptr in other)
    first = allocator.malloc(2 * MIB).ptr
    assert first == start
    allocator.begin_step()  # while the place is still in use
    assert not start <= allocator.malloc(2 * MIB).ptr < start + 8 * MIB
    assert allocator.malloc(2 * MIB).ptr == start + 2 * MIB
    assert allocator.plan_use() == PlanUse(True, 2, 3)
    assert check_snapshot(allocator.snapshot()) == []


def test_room_of_the_plan_is_used_before_a_request_fails_and_given_up_when_idle() -> None:
    allocator, start = made(capacity_mb=8)
    assert start <= allocator.malloc(3 * MIB).ptr < start + 4 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2 * MIB)  # stream 5's part is its own
    assert allocator.plan_use().is_following
    alone, _ = made(capacity_mb=8)
    assert alone.malloc(8 * MIB).size == 8 * MIB
    assert not alone.plan_use().is_following
    alone.begin_step()
    assert check_snapshot(alone.snapshot()) == []


def test_a_plan_in_use_is_not_replaced() -> None:
    allocator, _ = made()
    block = allocator.malloc(2 * MIB)
    with pytest.raises(AllocValueError, match="1 blocks of the plan that is followed are in use"):
        allocator.follow(None)
    allocator.free(block.ptr)
    allocator.follow(None)
    assert allocator.plan_use() == PlanUse(False, 0, 0)
    assert allocator.stats().reserved_bytes == 0


def test_a_plan_without_room_is_refused_and_none_is_followed() -> None:
    allocator = TwoPoolAllocator(AddressSource(4 * MIB), on_exhausted=lambda: None)
    with pytest.raises(OutOfMemoryError, match=r"7\.00 MiB"):
        allocator.follow(PLAN)
    assert not allocator.plan_use().is_following
    assert allocator.malloc(4 * MIB).size == 4 * MIB


def test_wrong_plans_are_refused() -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig(alignment_size=256))
    with pytest.raises(AllocValueError, match="aligned to 512, the settings to 256"):
        allocator.follow(PLAN)
    with pytest.raises(AllocTypeError, match="LifetimePlan or None"):
        allocator.follow("plan.json")  # type: ignore[arg-type]


def test_on_mapped_pages_a_plan_holds_no_memory_until_it_is_used() -> None:
    config = AllocatorConfig(use_virtual_memory=True)
    allocator = TwoPoolAllocator(PagedAddressSource(8 * MIB), config, on_exhausted=lambda: None)
    allocator.follow(PLAN)
    assert allocator.stats().reserved_bytes == 0
    held = allocator.malloc(2 * MIB)
    assert allocator.plan_use().num_planned == 1
    assert allocator.malloc(6 * MIB).size == 6 * MIB  # of the plan's other pages
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2 * MIB)
    allocator.free(held.ptr)
    assert allocator.malloc(2 * MIB).size == 2 * MIB
    assert check_snapshot(allocator.snapshot()) == []
