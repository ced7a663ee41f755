"""Arguments of collectives as contiguous memory: what is sent, and where results come to lie.

A strided tensor is sent as a copy, and filled by way of a contiguous stand-in: a "landing", the
pair of the tensor and the stand-in that is copied to it at the end. Wrong arguments raise
`RefusedError`, which the caller passes on to the other ranks.

    landings: Landings = []
    flat = in_place(x, landings)        # reduce this, then copy the landings
"""

from collections.abc import Sequence

import torch

from comm_collectives.base import as_bytes, dense
from comm_collectives.errors import RefusedError

Landings = list[tuple[torch.Tensor, torch.Tensor]]
Tensors = Sequence[torch.Tensor]


def source_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `x` in order; a copy if they are not so in memory."""
    return as_bytes(dense(x))


def target_of(x: torch.Tensor, landings: Landings) -> torch.Tensor:
    """Return memory for a new content of `x`, flat: its own if that is contiguous."""
    plain = x.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain.view(-1)
    stand_in = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    landings.append((plain, stand_in))
    return stand_in.view(-1)


def in_place(x: torch.Tensor, landings: Landings) -> torch.Tensor:
    """Return memory for a new content of `x`, flat, that has the old one."""
    flat = target_of(x, landings)
    if landings:
        flat.copy_(x.detach().reshape(-1))
    return flat


def apart(source: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    """Return `source`, or a copy if it shares memory with what will be overwritten."""
    start, end = source.data_ptr(), source.data_ptr() + source.nbytes
    for target in targets:
        if start < target.data_ptr() + target.nbytes and target.data_ptr() < end:
            return source.clone()
    return source


def target_bytes(outputs: Tensors, landings: Landings) -> list[torch.Tensor]:
    """Return memory for a new content of each tensor, as bytes."""
    return [as_bytes(target_of(output, landings)) for output in outputs]


def check_even(size: int, listed: Tensors, like: torch.Tensor) -> None:
    """Check that a list has one tensor for each rank, all of dtype and size of `like`.

    Raises:
        RefusedError: they do not fit.
    """
    if len(listed) != size:
        raise RefusedError(f"the list has {len(listed)} tensors; give one for each of {size} ranks")
    for tensor in listed:
        check_same_dtype(tensor, like)
        if tensor.numel() != like.numel():
            raise RefusedError(
                f"the list has a tensor of {tensor.numel()} elements where {like.numel()} are "
                "needed; this collective takes equal tensors"
            )


def check_same_dtype(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that two tensors have one dtype.

    Raises:
        RefusedError: they do not fit.
    """
    if a.dtype != b.dtype:
        raise RefusedError(f"output and input have dtypes {a.dtype} and {b.dtype}; give one dtype")
