"""A process that left shared memory neither sees the others' files nor they its own."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ranktest import can_leave_shared_memory, leave_shared_memory, run_ranks


@pytest.mark.skipif(not can_leave_shared_memory(), reason="no mount namespaces for this user")
def test_files_in_shared_memory_are_seen_by_nobody_else() -> None:
    name = f"/dev/shm/ranktest-{os.getpid()}"

    def fn(rank: int, world_size: int) -> list[bool]:
        if rank == 0:
            leave_shared_memory()
            Path(name).write_text("mine")
        dist.barrier()
        seen = Path(name).exists()
        dist.barrier()
        return [seen]

    assert run_ranks(fn, 2) == [[True], [False]]
    assert not Path(name).exists()
