"""New tensors by their layout: each rank makes its own part, and never more.

Invariant: an element's value depends on its place in the whole tensor alone, so that all layouts of
a `TensorSpec` hold the same tensor. Nothing is collective.

    weights = randn(TensorSpec((64, 512), torch.bfloat16, spec), rank, seed=7)
"""

import math

import torch

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.layout import FlatSpec, TensorSpec


def empty(
    tensor: TensorSpec, rank: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return room for the part of `rank`: its box, or a flat range of one as a vector.

    Raises:
        MeshValueError: `rank` is not in the mesh.
    """
    _check(tensor)
    return torch.empty(tensor.local_shape(rank), dtype=tensor.dtype, device=device)


def full(
    tensor: TensorSpec,
    rank: int,
    value: float,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the part of `rank` of a tensor whose elements are all `value`.

    Raises:
        MeshTypeError: the layout is partial.
        MeshValueError: `rank` is not in the mesh.
    """
    _check_whole(tensor)
    return torch.full(tensor.local_shape(rank), value, dtype=tensor.dtype, device=device)


def arange(
    tensor: TensorSpec, rank: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the part of `rank` of `torch.arange(numel).view(shape)`.

    Raises:
        MeshTypeError: the layout is partial.
        MeshValueError: `rank` is not in the mesh.
    """
    _check_whole(tensor)
    return _places(tensor, rank, device).to(tensor.dtype)


def randn(
    tensor: TensorSpec, rank: int, *, seed: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the part of `rank` of a tensor of normally distributed numbers.

    They are made of the seed and each element's place in double precision, by a counter and not by
    torch's generators; kinds of devices may differ in the last bit.

    Raises:
        MeshTypeError: the layout is partial, or the dtype is no floating dtype.
        MeshValueError: `rank` is not in the mesh.
    """
    _check_whole(tensor)
    check_kind(seed, int, "seed must be an integer")
    if not tensor.dtype.is_floating_point:
        raise MeshTypeError(f"randn makes floating point numbers, got {tensor.dtype}")
    counters = _places(tensor, rank, device) * 2
    key = _mixed_bits(torch.tensor(seed % 2**63, device=counters.device))
    # 53 bits and a half step, so that the logarithm never meets zero.
    first, second = (
        ((_shifted(_mixed_bits(counters + half ^ key), 11)).double() + 0.5) / 2**53
        for half in (0, 1)
    )
    return ((-2 * first.log()).sqrt() * (2 * math.pi * second).cos()).to(tensor.dtype)


def shard_tensor(whole: torch.Tensor, tensor: TensorSpec, rank: int) -> torch.Tensor:
    """Return a copy of the part that `rank` holds of a tensor that is there as a whole.

    Raises:
        MeshTypeError: the layout is partial, `whole` is no tensor or of another dtype.
        MeshValueError: `whole` has another shape, or `rank` is not in the mesh.
    """
    _check_whole(tensor)
    check_kind(whole, torch.Tensor, "whole must be a tensor")
    if whole.dtype != tensor.dtype:
        raise MeshTypeError(f"whole has dtype {whole.dtype}, expected {tensor.dtype}")
    if tuple(whole.shape) != tensor.shape:
        raise MeshValueError(f"whole has shape {tuple(whole.shape)}, expected {tensor.shape}")
    part = whole[tensor.box(rank).slices()]
    if not isinstance(tensor.spec, FlatSpec):
        return part.clone()
    begin, end = tensor.flat_range(rank)
    return part.flatten()[begin:end].clone()


def _places(tensor: TensorSpec, rank: int, device: torch.device | str | None) -> torch.Tensor:
    """The row-major number of each element of a rank's part in the whole tensor."""
    box = tensor.box(rank)
    if isinstance(tensor.spec, FlatSpec):
        inside = torch.arange(*tensor.flat_range(rank), device=device)
        places, stride = torch.zeros_like(inside), 1
        for dim in reversed(range(len(box.shape))):
            length = max(box.shape[dim], 1)  # of an empty box there is nothing to divide
            places += (inside % length + box.offset[dim]) * stride
            inside //= length
            stride *= tensor.shape[dim]
        return places
    places = torch.zeros(box.shape, dtype=torch.int64, device=device)
    for dim, (begin, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        stride = math.prod(tensor.shape[dim + 1 :])
        steps = torch.arange(begin, begin + length, device=device) * stride
        places += steps.view(-1, *(1 for _ in box.shape[dim + 1 :]))
    return places


def _mixed_bits(numbers: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the number."""
    numbers = numbers + -7046029254386353131
    numbers = (numbers ^ _shifted(numbers, 30)) * -4658895280553007687
    numbers = (numbers ^ _shifted(numbers, 27)) * -7723592293110705685
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right by `count` and fill with zeros; torch repeats the sign."""
    found: torch.Tensor = (numbers >> count) & (2 ** (64 - count) - 1)
    return found


def _check(tensor: TensorSpec) -> None:
    check_kind(tensor, TensorSpec, "tensor must be a TensorSpec")


def _check_whole(tensor: TensorSpec) -> None:
    _check(tensor)
    if tensor.partials:
        raise MeshTypeError(
            f"the layout is partial over {', '.join(tensor.partials)}; values are made whole, "
            "give a layout without Partial"
        )
