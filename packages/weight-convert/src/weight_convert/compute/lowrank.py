"""LoRA and DoRA put into a weight, a band of rows at a time, or found in what two differ in.

    for chunk in add_low_rank(AddLowRank(scaling=2.0), (weight, a, b), torch.bfloat16, shape):

Rounded as peft does: all in float32 and once at the end, but of fused experts the product, too. The
two factors are held, the weight is not.
"""

from collections.abc import Iterator, Sequence

import torch

from weight_convert.compute.elementwise import CHUNK_ELEMENTS, ranges
from weight_convert.compute.reading import TensorReader
from weight_convert.operations import AddLowRank, Factorise


def add_low_rank(
    operation: AddLowRank,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """A weight plus its update."""
    weight, a, b, *magnitude = inputs
    rows, columns = shape[-2:]
    outgoing = b.whole().to(torch.float32)
    height = max(1, min(CHUNK_ELEMENTS, most) // max(1, columns))
    for expert in range(operation.num_experts or 1):
        left, right = _factors(operation, a, outgoing, expert)
        for begin, count in ranges(rows, height):
            band = weight.read((expert * rows + begin) * columns, count * columns)
            update = (left[begin : begin + count] @ right) * operation.scaling
            if operation.num_experts:
                update = update.to(dtype)
            changed = band.view(count, columns).to(torch.float32) + update
            if magnitude:
                norms = torch.linalg.norm(changed, dim=1)
                changed = (magnitude[0].read(begin, count) / norms)[:, None] * changed
            yield changed.to(dtype)


def _factors(
    operation: AddLowRank, a: TensorReader, outgoing: torch.Tensor, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, rank] and [rank, columns] of one matrix."""
    rank = a.shape[0] // (operation.num_experts or 1)
    size = rank * a.num_columns
    incoming = a.read(expert * size, size).to(torch.float32).view(rank, a.num_columns)
    if operation.num_experts:
        outgoing = outgoing.view(len(outgoing), rank, operation.num_experts)[..., expert]
    return (incoming.T, outgoing.T) if operation.is_transposed else (outgoing, incoming)


def factorise(
    operation: Factorise,
    inputs: Sequence[TensorReader],
    _: torch.dtype,
    __: tuple[int, ...],
    ___: int,
) -> Iterator[torch.Tensor]:
    """A and then B of each expert's change; one change is held, and all of B."""
    before, after = inputs
    rows, columns = after.shape[-2:]
    size = rows * columns
    outgoing: list[torch.Tensor] = []
    for expert in range(operation.num_experts or 1):
        old, new = (one.read(expert * size, size).to(torch.float32) for one in (before, after))
        change = (new - old).view(rows, columns)
        left, values, right = torch.linalg.svd(
            change.T if operation.is_transposed else change, full_matrices=False
        )
        root = values[: operation.rank].sqrt()
        yield root[:, None] * right[: operation.rank]
        outgoing.append(left[:, : operation.rank] * root)
    yield torch.stack(outgoing, dim=-1) if operation.num_experts else outgoing[0]
