"""Writing a result into a tensor that the user gave: any strides, and memory shared with the input.

check_written(output, "output")
write(output, y)                 # nothing outside the view is touched
"""

import torch

from comm_collectives.base import check_apart, check_dense

# What torch cannot copy between strides, or not without a warning, as integers of its size.
_INTEGERS_OF = {torch.complex32: torch.int32, torch.float4_e2m1fn_x2: torch.uint8}


def write(output: torch.Tensor, y: torch.Tensor) -> None:
    """Write contiguous `y` into `output` of the same dtype and as many elements."""
    target, y = output.detach(), y.view(output.shape)
    integers = _INTEGERS_OF.get(output.dtype)
    if integers is None or target.is_conj() or target.is_neg():
        target.copy_(y)
    else:
        target.view(integers).copy_(y.view(integers))


def mark_written(x: torch.Tensor) -> None:
    """Let autograd know that a backend wrote into a tensor."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the one after the last."""
    if not x.numel():
        return 0, 0
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (steps + 1) * x.itemsize


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory."""
    (start_a, end_a), (start_b, end_b) = extent(a), extent(b)
    return a.device == b.device and start_a < end_b and start_b < end_a


def takes_bytes(output: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the bytes of a result may arrive in an output itself, while `x` is read."""
    has_bits = output.is_conj() or output.is_neg()
    return output.is_contiguous() and not has_bits and not overlap(output, x)


def check_written(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Check that a tensor can be read and written.

    Raises:
        TypeError, ValueError: it is not dense, or its elements share memory.
    """
    check_dense(tensor, name)
    check_apart(tensor, name)
