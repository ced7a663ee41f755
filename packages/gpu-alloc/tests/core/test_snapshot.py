from dataclasses import replace

import pytest

from gpu_alloc import AddressSource, AllocatorConfig, Snapshot, TwoPoolAllocator, check_snapshot

MIB = 1 << 20


def _sound() -> Snapshot:
    """One small chunk of a free, a used, a free and a used block, and one large chunk, in use."""
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    blocks = [allocator.malloc(1000) for _ in range(3)]
    allocator.free(blocks[1].ptr)
    allocator.malloc(2 * MIB)
    snapshot = allocator.snapshot()
    assert check_snapshot(snapshot) == []
    assert [block.is_free for block in snapshot.chunks[0].blocks] == [True, False, True, False]
    return snapshot


def _with_block(snapshot: Snapshot, index: int, **changes: int | bool) -> Snapshot:
    chunk = snapshot.chunks[0]
    blocks = list(chunk.blocks)
    blocks[index] = replace(blocks[index], **changes)
    return replace(snapshot, chunks=(replace(chunk, blocks=tuple(blocks)), *snapshot.chunks[1:]))


@pytest.mark.parametrize(
    ("index", "changes", "said"),
    [
        (1, {"size": 2048}, "gap or overlap"),
        (1, {"size": 512}, "gap or overlap"),
        (3, {"size": 512}, "its blocks at"),
        (2, {"ptr": 7}, "not aligned"),
        (1, {"size": 0}, "not aligned"),
        (1, {"requested_bytes": 1025}, "counted wrongly"),
        (1, {"requested_bytes": 0}, "counted wrongly"),
        (2, {"requested_bytes": 1}, "counted wrongly"),
        (1, {"is_free": True, "requested_bytes": 0}, "not merged"),
        (2, {"is_free": False, "requested_bytes": 9}, "free lists hold"),
    ],
)
def test_each_corruption_is_found(index: int, changes: dict[str, int | bool], said: str) -> None:
    problems = check_snapshot(_with_block(_sound(), index, **changes))
    assert any(said in problem for problem in problems), problems


def test_overlapping_chunks_are_found() -> None:
    snapshot = _sound()
    small, large = snapshot.chunks
    moved = replace(snapshot, chunks=(small, replace(large, ptr=small.ptr + 512)))
    assert any("overlap" in problem for problem in check_snapshot(moved))


@pytest.mark.parametrize("entry", [0, 1])
def test_block_missing_from_or_twice_in_the_free_lists_is_found(entry: int) -> None:
    snapshot = _sound()
    entries = snapshot.free_entries
    for wrong in (entries[:entry] + entries[entry + 1 :], (*entries, entries[entry])):
        problems = check_snapshot(replace(snapshot, free_entries=wrong))
        assert any("free lists hold" in problem for problem in problems)


def test_block_on_the_list_of_another_stream_is_found() -> None:
    snapshot = _sound()
    pool, _, ptr, size = snapshot.free_entries[0]
    wrong = ((pool, 5, ptr, size), *snapshot.free_entries[1:])
    assert check_snapshot(replace(snapshot, free_entries=wrong))
