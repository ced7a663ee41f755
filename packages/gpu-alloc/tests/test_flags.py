"""What each flag does, as a table: Paddle's documents say it, the README names what differs.

A row has the settings, what is asked for in turn (a size in KiB; a negative one frees the oldest of
that size), and how many MiB are held from the device after each; "oom" for a request that fails.
"""

from pathlib import Path

import pytest

from gpu_alloc import AddressSource, AllocatorConfig, OutOfMemoryError, TwoPoolAllocator

pytestmark = [
    pytest.mark.usefixtures("each_core"),
    pytest.mark.filterwarnings("ignore::gpu_alloc.errors.IgnoredSettingWarning"),
]
MIB, K = 1 << 20, 1 << 10
README = Path(__file__).parents[1] / "README.md"

Row = tuple[str, list[int], list[int | str]]
TABLE: list[Row] = [
    # What is as large as the threshold is small; above it, large. Two pools, two chunks.
    ("small_pool_size_in_mb:1", [1 * K, 1 * K, 1 * K + 1], [2, 2, 4]),
    ("small_pool_size_in_mb:4", [4 * K, 1], [4, 6]),
    ("small_pool_size_in_mb:0", [1, 1 * K], [2, 2]),
    # A pool grows by its chunk, or by the request where that is larger; 0: by the request.
    ("small_pool_auto_growth_chunk_size_in_mb:8", [1, 1 * K, 7 * K], [8, 8, 16]),
    ("small_pool_auto_growth_chunk_size_in_mb:0", [1, 1 * K, 1 * K], [2, 2, 4]),
    ("large_pool_auto_growth_chunk_size_in_mb:20", [3 * K, 16 * K, 22 * K], [20, 20, 42]),
    ("large_pool_auto_growth_chunk_size_in_mb:0", [4 * K, 6 * K], [4, 10]),
    ("small_pool_size_in_mb:0,auto_growth_chunk_size_in_mb:16", [1, 15 * K, 2 * K], [16, 16, 32]),
    ("small_pool_size_in_mb:0,auto_growth_chunk_size_in_mb:0", [4 * K, 6 * K], [4, 10]),
    # The other mode's chunk sizes are not used.
    ("auto_growth_chunk_size_in_mb:16", [4 * K], [4]),
    ("small_pool_size_in_mb:0,large_pool_auto_growth_chunk_size_in_mb:20", [4 * K], [4]),
    # Taken at the start, used first, kept when idle.
    ("large_pool_pre_alloc_in_mb:32", [8 * K, 24 * K, -8 * K, 1], [32, 32, 32, 34]),
    ("small_pool_pre_alloc_in_mb:4", [1 * K, 2 * K, -1 * K], [4, 6, 6]),
    ("small_pool_pre_alloc_in_mb:4,large_pool_pre_alloc_in_mb:32", [1, 2 * K], [36, 36]),
    # One pool: the small pre-allocation is dropped; the large one is taken, unlike in Paddle.
    ("small_pool_size_in_mb:0,small_pool_pre_alloc_in_mb:4", [4 * K], [4]),
    ("small_pool_size_in_mb:0,large_pool_pre_alloc_in_mb:32", [1, 30 * K], [32, 32]),
    # Idle chunks: kept; given back at once, but not the pre-allocation; given back before growth.
    ("", [4 * K, 6 * K, -4 * K, 8 * K], [4, 10, 10, 18]),
    ("free_idle_chunk:true", [4 * K, 6 * K, -4 * K, 8 * K], [4, 10, 6, 14]),
    ("free_idle_chunk:true,large_pool_pre_alloc_in_mb:4", [4 * K, -4 * K], [4, 4]),
    ("free_when_no_cache_hit:true", [4 * K, 6 * K, -4 * K, 8 * K], [4, 10, 10, 14]),
    ("free_when_no_cache_hit:true", [4 * K, -4 * K, 3 * K], [4, 4, 4]),
    # Both pools together stay within the limit; a chunk beyond it shrinks to the request.
    ("memory_limit_in_mb:8", [1, 6 * K, 2 * K], [2, 8, "oom"]),
    ("memory_limit_in_mb:8", [4 * K, -4 * K, 8 * K], [4, 4, 8]),
    ("memory_limit_in_mb:8,large_pool_auto_growth_chunk_size_in_mb:20", [6 * K], [6]),
    ("memory_limit_in_mb:0", [900 * K], [900]),
]


@pytest.mark.parametrize(("settings", "asked", "held_mb"), TABLE)
def test_a_flag_means_what_its_document_says(
    settings: str, asked: list[int], held_mb: list[int | str]
) -> None:
    source = AddressSource()
    config = AllocatorConfig.parse(settings)
    allocator = TwoPoolAllocator(source, config, on_exhausted=lambda: None)
    live: list[tuple[int, int]] = []
    held: list[int | str] = []
    for size in asked:
        try:
            if size < 0:
                ptr = next(p for s, p in live if s == -size)
                live.remove((-size, ptr))
                allocator.free(ptr)
            else:
                live.append((size, allocator.malloc(size << 10).ptr))
            held.append(source.used_bytes // MIB)
        except OutOfMemoryError:
            held.append("oom")
    assert held == held_mb


def test_blocks_start_at_and_are_padded_to_the_alignment() -> None:
    for alignment in (1, 256, 4096):
        config = AllocatorConfig(alignment_size=alignment)
        allocator = TwoPoolAllocator(AddressSource(), config)
        for size in (1, 300, 5000):
            ptr, given = allocator.malloc(size)
            assert ptr % alignment == 0 and given == -(-size // alignment) * alignment


def test_every_setting_has_a_row_and_every_difference_is_named() -> None:
    rows = ",".join(settings for settings, _, _ in TABLE)
    without = ("alignment_size", "use_virtual_memory")  # above; tests/core/test_pages.py
    for item in AllocatorConfig().format().split(","):
        name = item.split(":")[0]
        assert name in rows or name in without, name
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert "Three things differ." in text
    for said in ("here the large one is taken", "IgnoredSettingWarning", "alignment of 256"):
        assert said in text
