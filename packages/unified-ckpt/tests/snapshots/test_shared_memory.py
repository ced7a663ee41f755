import mmap
import os
from pathlib import Path

import pytest

from unified_ckpt.errors import SaveError
from unified_ckpt.snapshots.shared_memory import (
    SharedMemory,
    available_bytes,
    cgroup_available_bytes,
    check_memory,
)


def test_sizes_are_whole_pages_even_of_nothing() -> None:
    for wanted in (0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1):
        memory = SharedMemory.allocate(wanted, purpose="a test")
        assert memory.num_bytes % mmap.PAGESIZE == 0 and memory.num_bytes >= max(wanted, 1)
        assert not memory.tensor.any()
        memory.close()


def test_a_tensor_outlives_the_descriptor() -> None:
    memory = SharedMemory.allocate(10, purpose="a test")
    tensor = memory.tensor
    memory.close()
    tensor[3] = 7
    assert tensor.sum() == 7


def test_a_descriptor_that_cannot_be_mapped_is_closed() -> None:
    fd = os.memfd_create("of no bytes at all")
    with pytest.raises((OSError, ValueError)):
        SharedMemory.attach(fd)
    with pytest.raises(OSError, match=r"Bad file descriptor"):
        os.fstat(fd)


def test_more_than_there_is_is_refused_with_both_sizes() -> None:
    with pytest.raises(SaveError, match=r"the rest needs \d+ bytes of memory, but only \d+ are"):
        check_memory(2 * available_bytes(), purpose="the rest")


def test_pages_of_idle_files_count_as_free_in_a_cgroup(tmp_path: Path) -> None:
    assert cgroup_available_bytes(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("950\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 600\nactive_file 250\n")
    assert cgroup_available_bytes(tmp_path) == 650
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_available_bytes(tmp_path) == float("inf")
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("450\n")
    (old / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 30\n")
    assert cgroup_available_bytes(tmp_path) == 80
