"""Page-locked host memory, and what happens where none can be had: slower copies, said loudly.

pin(memory)  # a uint8 tensor; copies between it and a device then need not stop the host
"""

import contextlib
import warnings

import torch

from unified_ckpt.errors import UnpinnedMemoryWarning


def pin(memory: torch.Tensor) -> bool:
    """Lock host memory (uint8) in place; return whether that worked.

    A failure warns and leaves nothing behind: CUDA's runtime keeps it as this thread's last error,
    and the next kernel would report it as its own.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # a launch takes the last error up, and so clears it
    _warn(memory.numel(), f"cudaHostRegister ended with error {code}")
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """Return pinned memory, uint8 `[num_bytes]`; with a warning other memory if there is none.

    It comes from torch's allocator, which lets no copy under way lose it.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _warn(num_bytes, str(error).partition("\n")[0])
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _warn(num_bytes: int, why: str) -> None:
    warnings.warn(
        f"{num_bytes} bytes of host memory could not be page-locked ({why}); copies between it and "
        "devices are right, but slower, and stop the host",
        UnpinnedMemoryWarning,
        stacklevel=3,
    )
