"""CUDA devices made of CPU memory, on which races, host waits and mixed devices are found.

from devicetest import fake_cuda

with fake_cuda(devices=2) as cuda:
    x = torch.ones(4, device="cuda:1")
    assert cuda.races == [] and cuda.syncs == []
"""

from devicetest.findings import Race, Sync
from devicetest.machine import Machine
from devicetest.patching import fake_cuda
from devicetest.tensors import DeviceTensor

__all__ = ["DeviceTensor", "Machine", "Race", "Sync", "fake_cuda"]
