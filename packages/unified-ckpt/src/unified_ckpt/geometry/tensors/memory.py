"""The bytes of a tensor as a memoryview, without a copy and without numpy.

byte_view(torch.zeros(3)).nbytes == 12
"""

import ctypes

import torch

from unified_ckpt._torch_private import is_traceable_wrapper_subclass
from unified_ckpt.errors import CheckpointValueError

_BYTE = ctypes.c_ubyte


def byte_view(tensor: torch.Tensor, *, owner: object = None) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor; it, and the owner, live as long."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise CheckpointValueError(f"no contiguous CPU tensor: {tensor.device}, {tensor.stride()}")
    num_bytes: int = tensor.nbytes
    if num_bytes == 0:
        return memoryview(b"")
    array = (_BYTE * num_bytes).from_address(tensor.data_ptr())
    array.owner = tensor, owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's row-major values are its CPU memory as it lies there."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others, which it tells: quantized weights, DTensors."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not plain and is_traceable_wrapper_subclass(tensor)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View one-byte dtypes as uint8, since torch copies not all of them; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def contiguous_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as contiguous CPU memory; copies only where it must."""
    if is_plain_memory(tensor):
        return tensor
    plain = tensor.resolve_conj().resolve_neg()
    return bits_of(plain).to("cpu").contiguous()


def narrow_box(
    tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the view of a box of a tensor."""
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor
