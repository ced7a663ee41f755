import pytest
import torch

from devicetest import fake_cuda
from unified_ckpt.devices import pin, unpin
from unified_ckpt.devices.pinning import pinned_memory
from unified_ckpt.errors import UnpinnedMemoryWarning
from unified_ckpt.snapshots.shared_memory import SharedMemory


def test_memory_is_pinned_in_place_and_given_back() -> None:
    with fake_cuda() as cuda:
        memory = torch.zeros(64, dtype=torch.uint8)
        assert pin(memory) and memory.is_pinned()
        unpin(memory)
        assert not memory.is_pinned() and cuda.problems == []


def test_a_failed_page_lock_is_said_and_leaves_no_error_behind() -> None:
    with fake_cuda() as cuda:
        cuda.fail_page_locks = 304
        with pytest.warns(UnpinnedMemoryWarning, match="64 bytes .* error 304.*slower"):
            assert not pin(torch.zeros(64, dtype=torch.uint8))
        assert torch.ones(1, device="cuda").tolist() == [1]
        with pytest.warns(UnpinnedMemoryWarning, match="page-locking failed with 304"):
            assert not pinned_memory(64).is_pinned()
        memory = SharedMemory.allocate(64, purpose="a test")
        with pytest.warns(UnpinnedMemoryWarning):
            memory.pin()
        memory.close()
        assert cuda.problems == []
