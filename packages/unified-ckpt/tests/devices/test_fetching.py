import random

import torch

from devicetest import fake_cuda
from unified_ckpt.devices import Fetcher
from unified_ckpt.devices.ring import BLOCK_BYTES


def tensors_of(rng: random.Random) -> list[torch.Tensor]:
    """Tensors of two devices and the host in any order, more than fit in some blocks."""
    made = []
    for number in range(60):
        size = rng.choice([0, 1, 70, 5000, 300_000, 2_000_000])
        where = rng.choice(["cpu", "cuda:0", "cuda:0", "cuda:1"])
        tensor = torch.arange(number, number + 2 * size, dtype=torch.float32).to(where)
        made.append(tensor[::2] if rng.random() < 0.3 else tensor[:size])
    return made


def test_bytes_come_in_order_from_two_devices_and_the_host() -> None:
    seed = random.SystemRandom().randrange(2**31)
    with fake_cuda(devices=2) as cuda:
        tensors = tensors_of(random.Random(seed))
        want = [t.cpu().numpy().tobytes() for t in tensors]
        cuda.forget()
        held = []
        with Fetcher() as fetcher:
            for number, buffer in enumerate(fetcher.bytes_of(tensors)):
                held = [*held[-7:], (number, buffer)]  # callers keep some for a while
                assert all(bytes(kept) == want[n] for n, kept in held), f"seed {seed}"
        assert number == len(tensors) - 1
        assert cuda.races == [] and cuda.problems == []
        assert {sync.kind for sync in cuda.syncs} == {"event.synchronize"}
        for tensor in tensors:
            tensor.zero_()
        assert cuda.races == []  # the host has waited, so the streams need not


def test_the_devices_are_blocks_ahead_of_who_takes_the_bytes() -> None:
    with fake_cuda() as cuda:
        tensors = [torch.ones(BLOCK_BYTES // 4, device="cuda") for _ in range(6)]
        cuda.forget()
        with Fetcher() as fetcher:
            buffers = fetcher.bytes_of(tensors)
            next(buffers)
            assert cuda.counts["late copy to host"] == 3 and len(cuda.syncs) == 1
            assert sum(1 for _ in buffers) == 5


def test_a_reader_that_stops_leaves_no_copy_under_way() -> None:
    with fake_cuda() as cuda:
        tensor = torch.ones(BLOCK_BYTES, device="cuda")
        with Fetcher() as fetcher:
            next(fetcher.bytes_of(tensor.split(BLOCK_BYTES // 4)))
        tensor.zero_()
        assert cuda.races == []
