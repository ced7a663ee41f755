"""Pins memory that was allocated elsewhere, such as memory shared with the saver process.

pin(memory)  # a uint8 tensor; copies between it and a device need not stop the host
"""

import torch

from unified_ckpt.errors import SaveError


def pin(memory: torch.Tensor) -> None:
    """Lock host memory (uint8) in place, so that devices copy to it asynchronously."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise SaveError(f"cudaHostRegister of {memory.numel()} bytes failed with error {code}")


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
