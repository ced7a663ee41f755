"""Tensors as bytes: moving data needs no arithmetic, so every dtype travels as uint8.

Backends refuse many dtypes (gloo: int16, uint16, every fp8 ...). A view of the same memory as bytes
is accepted everywhere. Reductions must never use it: adding bytes is not adding numbers.

    flat = as_bytes(x)                           # [x.nbytes] uint8, shares memory if x is dense
    y = from_bytes(flat, x.dtype, x.shape)       # the same memory with its dtype again
"""

import ctypes
import math
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch.autograd.forward_ad import unpack_dual

from comm_collectives._torch_private import (
    is_functorch_wrapped_tensor,
    is_lazy,
    is_traceable_wrapper_subclass,
    is_zerotensor,
)
from comm_collectives.errors import CommTypeError, CommValueError

# The number under which a dtype is named in headers. Append only: both ends must agree.
_NAMES = """
bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
float8_e8m0fnu float4_e2m1fn_x2
"""
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES.split())
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}


def dtype_code(dtype: torch.dtype) -> int:
    """Return the header number of a dtype.

    Raises:
        TypeError: the dtype has no plain bytes (quantised and other exotic dtypes).
    """
    code = _CODE_OF.get(dtype)
    if code is None:
        raise CommTypeError(f"tensors of dtype {dtype} cannot be moved; convert to a plain dtype")
    return code


def new_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Allocate a contiguous tensor, uninitialised."""
    # As bytes, because torch warns when it allocates complex32.
    flat = torch.empty(num_bytes(dtype, shape), dtype=torch.uint8, device=device)
    return from_bytes(flat, dtype, shape)


def check_dense(x: object, name: str, *, is_used: bool = True) -> None:
    """Check that `x` is a dense tensor with data, which a tensor that is not `is_used` may lack.

    Raises:
        TypeError: it is not a tensor, or one that wraps others (DTensor, nested), or sparse,
            quantised, on the meta device, without memory, or inside a transform of torch.func.
    """
    if not isinstance(x, torch.Tensor):
        raise CommTypeError(f"{name} is a {type(x).__name__}; give a torch.Tensor")
    if x.is_nested or is_traceable_wrapper_subclass(x):
        raise CommTypeError(
            f"{name} is a {type(x).__name__}, which wraps other tensors; give those "
            "(for a DTensor its to_local())"
        )
    if x.layout != torch.strided or x.is_quantized or x.is_meta:
        raise CommTypeError(
            f"{name} has layout {x.layout} on device {x.device}; give a dense tensor with data"
        )
    dtype_code(x.dtype)
    if is_functorch_wrapped_tensor(x) or unpack_dual(x).tangent is not None:
        raise CommTypeError(
            f"{name} is inside a transform of torch.func or forward-mode differentiation, which "
            "no call here follows; call outside of it"
        )
    lacks_data = is_lazy(x) or is_zerotensor(x)
    if is_used and (lacks_data or (x.numel() and not x.untyped_storage().nbytes())):
        raise CommTypeError(
            f"{name} has no memory: it was freed, as FSDP does with parameters, or is a lazy "
            "module's that has not run; give a tensor with data"
        )


def check_tensors(tensors: object, *, are_used: bool = True) -> Sequence[torch.Tensor]:
    """Return an argument called `tensors`, if it is a list or tuple of dense tensors.

    Those that are not `are_used` may be without memory, as FSDP's parameters are between steps.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(tensors, list | tuple):
        raise CommTypeError(f"tensors is a {type(tensors).__name__}; give a list of tensors")
    for i, tensor in enumerate(tensors):
        check_dense(tensor, f"tensors[{i}]", is_used=are_used)
    return tensors


def check_apart(x: torch.Tensor, name: str) -> None:
    """Check that each element of a tensor to be written has memory of its own.

    Raises:
        ValueError: it has not.
    """
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and x.numel():
            if stride <= reach:
                raise CommValueError(
                    f"elements of {name} may share memory (shape {list(x.shape)}, strides "
                    f"{list(x.stride())}); give {name}.contiguous() and copy from it"
                )
            reach += stride * (size - 1)


def is_dense(x: object) -> TypeGuard[torch.Tensor]:
    """Whether `check_dense` finds nothing wrong with a tensor."""
    try:
        check_dense(x, "x")
    except TypeError:
        return False
    return True


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return `x` without gradient history as one contiguous block (no copy if it is one).

    A sparse tensor, as gradients can be, with its zeros.
    """
    plain = (x if x.layout == torch.strided else x.to_dense()).detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.complex32 and not plain.is_contiguous():
        # As pairs of float16, because torch warns when it allocates complex32.
        return torch.view_as_complex(torch.view_as_real(plain).contiguous())
    return plain.contiguous()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of any shape as [nbytes] uint8."""
    flat = x.view(-1)
    if flat.stride(0) != 1:  # one element, expanded: contiguous all the same
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def bytes_of(flat: torch.Tensor) -> bytes:
    """Copy a contiguous uint8 tensor into a bytes object (without numpy, which torch can lack)."""
    on_host = flat.cpu()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel()) if on_host.numel() else b""


def from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View [nbytes] uint8 that starts at an aligned address as a tensor of `dtype` and `shape`.

    To autograd it is no view: one made without gradients could not be changed in place with them.
    """
    return flat.view(dtype).view(tuple(shape)).data


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Size in bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize
