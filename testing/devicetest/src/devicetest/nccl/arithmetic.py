"""What a collective of NCCL gives each rank, from what all ranks gave it, as bytes.

combine("all_gather", (), [(b"a",), (b"b",)], 0) == [b"a", b"b"]
"""

from collections.abc import Callable, Sequence

import torch

Given = Sequence[Sequence[bytes]]  # by rank
SUPPORTED_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
SUPPORTED_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def combine(name: str, terms: Sequence[object], given: Given, place: int) -> list[bytes]:
    """Return the chunks that the rank at `place` gets.

    Args:
        terms: of the reductions ("dtype", "op"), of rooted ones the root's place last.
    """
    root = terms[-1] if terms else None
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        if name == "reduce" and root != place:
            return []
        chunk = place if name == "reduce_scatter" else 0
        return [_reduce([mine[chunk] for mine in given], str(terms[0]), str(terms[1]))]
    if name == "broadcast":
        return [next(mine[0] for rank, mine in enumerate(given) if rank == root)]
    if name == "scatter":
        return [next(mine[place] for rank, mine in enumerate(given) if rank == root)]
    if name == "all_to_all":
        return [mine[place] for mine in given]
    if name == "gather" and root != place:
        return []
    return [mine[0] for mine in given]  # all_gather, gather


def _reduce(given: Sequence[bytes], dtype_name: str, op: str) -> bytes:
    dtype = getattr(torch, dtype_name)
    if not given[0]:
        return b""
    total, *rest = (torch.frombuffer(bytearray(each), dtype=dtype) for each in given)
    if dtype == torch.bool:
        total, rest = total.to(torch.uint8), [each.to(torch.uint8) for each in rest]
    fold: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
    }
    for each in rest:
        total = fold[op](total, each)
    if op == "AVG":
        total = total / len(given) if total.is_floating_point() else total // len(given)
    return bytes(total.to(dtype).view(torch.uint8).numpy())
