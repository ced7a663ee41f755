import random

import pytest

from unified_ckpt.background.offload_plan import ByteSlice, plan_offload


def test_the_example_of_the_module() -> None:
    plan = plan_offload([100, 0, 300], num_chunks=2, unit_bytes=1)
    assert plan.chunks == (
        (ByteSlice(0, 0, 100), ByteSlice(2, 0, 100)),
        (ByteSlice(2, 100, 300),),
    )


def test_every_byte_is_copied_once_in_order_and_chunks_are_balanced() -> None:
    for _ in range(300):
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        sizes = [
            rng.choice([0, 1, 7, 4096, rng.randrange(100_000)]) for _ in range(rng.randrange(9))
        ]
        divisible = [rng.random() < 0.8 for _ in sizes]
        num_chunks, unit = rng.randint(1, 12), rng.choice([1, 64, 4096])
        plan = plan_offload(sizes, num_chunks=num_chunks, divisible=divisible, unit_bytes=unit)
        pieces = [piece for chunk in plan.chunks for piece in chunk]
        expected = [(i, b) for i, size in enumerate(sizes) for b in ([0, size] if size else [])]
        joined: list[tuple[int, int]] = []
        for index, begin, end in pieces:
            assert end > begin, seed
            if joined and joined[-1] == (index, begin):
                assert divisible[index] and begin % unit == 0, seed
                joined[-1] = (index, end)
            else:
                joined += [(index, begin), (index, end)]
        assert joined == expected, seed
        assert len(plan.chunks) == num_chunks, seed
        if all(divisible):
            share = -(-sum(sizes) // num_chunks)
            assert all(n <= share + unit for n in plan.chunk_bytes()), (seed, plan.chunk_bytes())


def test_whole_items_go_where_their_middle_lies() -> None:
    plan = plan_offload([10, 100, 10], num_chunks=2, divisible=[True, False, True], unit_bytes=1)
    assert [piece.item for piece in plan.chunks[0]] == [0]
    assert [piece.item for piece in plan.chunks[1]] == [1, 2]


def test_one_chunk_takes_everything() -> None:
    assert plan_offload([5, 6], num_chunks=1).chunks == ((ByteSlice(0, 0, 5), ByteSlice(1, 0, 6)),)
    assert plan_offload([], num_chunks=3).chunks == ((), (), ())


def test_numbers_out_of_range_are_refused() -> None:
    for sizes, num_chunks in (([1], 0), ([-1], 1)):
        with pytest.raises(ValueError, match=r"must be at least 1, and sizes"):
            plan_offload(sizes, num_chunks=num_chunks)
