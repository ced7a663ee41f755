import torch

from devicetest import fake_cuda
from unified_ckpt.devices import Sender
from unified_ckpt.devices.ring import BLOCK_BYTES


def test_bytes_reach_two_devices_and_memory_is_used_again_only_when_sent() -> None:
    with fake_cuda(devices=2) as cuda:
        sizes = [1000, BLOCK_BYTES // 4, 70, BLOCK_BYTES // 8, 5] * 4
        targets = [torch.zeros(s, device=f"cuda:{n % 2}") for n, s in enumerate(sizes)]
        targets[0] = torch.zeros(2000, device="cuda:0")[::2]
        cuda.forget()
        with Sender() as sender:
            for number, target in enumerate(targets):
                buffer = sender.place(target)
                if buffer is None:
                    sender.send()
                    buffer = sender.place(target)
                values = torch.full((target.numel(),), float(number))
                buffer[:] = memoryview(values.numpy()).cast("B")
            sender.send()
        for number, target in enumerate(targets):
            assert bool((target == number).all()), number
        assert cuda.races == [] and cuda.problems == []
        kinds = {sync.kind for sync in cuda.syncs if sync.where.startswith("sending.py")}
        assert kinds == {"event.synchronize"}
