import json
import threading
import time

import pytest
import torch

from unified_ckpt import Box, Shard
from unified_ckpt.errors import SaveError
from unified_ckpt.snapshots.shared_memory import SharedMemory, available_bytes
from unified_ckpt.snapshots.staging import ALIGNMENT_BYTES, StagingLayout, StagingPool


def shards() -> dict[str, list[Shard]]:
    flat = Shard(
        key="flat", tensor=torch.arange(5.0), box=Box((4, 3), (0, 0), (4, 3), (2, 7), replica_id=1)
    )
    tensors = {
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "matrix": torch.rand(3, 5).half(),
    }
    plain = [
        Shard.of(key, t, global_shape=tuple(t.shape), offset=(0,) * t.dim())
        for key, t in tensors.items()
    ]
    return {"model": plain, "optimizer": [flat], "nothing": []}


def test_a_layout_keeps_every_shard_apart_aligned_and_the_same_after_json() -> None:
    parts = shards()
    layout = StagingLayout.of(parts)
    again = StagingLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.boxes() == layout.boxes() and again.num_bytes == layout.num_bytes
    assert layout.matches(parts) and again.matches(parts)
    ends = [0]
    for entry in layout.entries:
        assert entry.begin % ALIGNMENT_BYTES == 0 and entry.begin >= ends[-1]
        ends.append(entry.begin + entry.num_bytes)
    assert ends[-1] <= layout.num_bytes
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    flat = [shard for part in parts.values() for shard in part]
    for view, shard in zip(layout.views(memory), flat, strict=True):
        view.copy_(shard.tensor)
    staged = again.shards(memory)
    assert list(staged) == list(parts)
    for part, wanted in parts.items():
        for found, shard in zip(staged[part], wanted, strict=True):
            assert found.meta == shard.meta
            assert torch.equal(found.tensor, shard.tensor)


def test_another_state_does_not_match() -> None:
    parts = shards()
    layout = StagingLayout.of(parts)
    assert not layout.matches({**parts, "nothing": parts["optimizer"]})
    assert not layout.matches({"model": parts["model"]})
    assert not layout.matches({**parts, "model": parts["model"][:-1]})
    with pytest.raises(TypeError, match=r"part 'model': a shard is a int; expected Shard"):
        StagingLayout.of({"model": [3]})  # type: ignore[list-item]


def test_memory_is_shared_by_descriptor_and_already_touched() -> None:
    memory = SharedMemory.allocate(10_000_000, purpose="a test")
    assert memory.num_bytes % 4096 == 0 and memory.num_bytes >= 10_000_000
    before = faults()
    memory.tensor.fill_(7)
    assert faults() - before < memory.num_bytes // 4096 // 4  # far from one fault a page
    other = SharedMemory.attach(memory.fd)
    assert other.tensor.eq(7).all()
    other.tensor[5] = 9
    assert memory.tensor[5] == 9
    memory.close()


def faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_too_large_a_state_is_refused_with_sizes() -> None:
    needed = 2 * available_bytes()
    with pytest.raises(SaveError, match=rf"needs {2 * needed} bytes of memory, but only \d+ are"):
        StagingPool(2).prepare(needed)


def test_the_pool_is_bounded_and_waits() -> None:
    pool = StagingPool(2)
    first, second = (pool.acquire(1000, timeout_s=1.0) for _ in range(2))
    assert first.memory.fd != second.memory.fd
    started = time.monotonic()
    with pytest.raises(SaveError, match=r"all 2 staging buffers still wait .* after 0\.2 s"):
        pool.acquire(1000, timeout_s=0.2)
    assert time.monotonic() - started >= 0.2
    with pytest.raises(SaveError, match=r"after 0 s"):
        pool.acquire(1000, timeout_s=0.0)
    threading.Timer(0.1, pool.release, [first]).start()
    assert pool.acquire(1000, timeout_s=10.0) is first
    pool.release(second)
    larger = pool.acquire(50_000, timeout_s=1.0)
    assert larger.memory.num_bytes >= 50_000
    with pytest.raises(ValueError, match=r"num_buffers=0; a pool needs at least 1"):
        StagingPool(0)


def test_a_request_that_grows_by_less_than_the_room_gets_the_same_memory() -> None:
    pool = StagingPool(1, room_bytes=8192)
    pool.prepare(10_000)
    used = []
    for num_bytes in (10_000, 14_000, 18_000):
        used.append(pool.acquire(num_bytes, timeout_s=1.0))
        pool.release(used[-1])
    assert used[0] is used[1] is used[2]
    larger = pool.acquire(30_000, timeout_s=1.0)
    assert larger is not used[0] and larger.memory.num_bytes >= 38_000
