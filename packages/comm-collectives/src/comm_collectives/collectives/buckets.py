"""Reduce many tensors in few large transfers.

A bucket holds tensors of one dtype and device, packed into one flat tensor, and is reduced by one
`all_reduce`. Every rank gives tensors of the same shapes in the same order, so the ranks fill the
same buckets.

    reduce_in_buckets([p.grad for p in model.parameters()], group=dp_group)
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_apart, check_tensors
from comm_collectives.call.groups import Group, check_integer, group_state
from comm_collectives.call.handles import launch
from comm_collectives.collectives.reduction import all_reduce_call, check_op
from comm_collectives.errors import CommValueError

BUCKET_BYTES = 25 << 20
T = TypeVar("T", bound=torch.Tensor)


@graph_break
def reduce_in_buckets(
    tensors: Sequence[torch.Tensor],
    *,
    group: Group | None = None,
    op: str = "sum",
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float | None = None,
) -> None:
    """Reduce every tensor over the ranks, in place.

    Collective: every rank of the group gives tensors of the same shapes and dtypes in the same
    order. Besides the tensors, one bucket at a time is held in memory. No gradient flows through
    the result. A list that is empty on every rank is fine; ranks still compare the call.

    Args:
        tensors: any shapes, strides and dtypes that `all_reduce` takes, each element once.
        group: None is the default group.
        op: as in `all_reduce`.
        bucket_bytes: the most that a bucket holds; a larger tensor has a bucket of its own.
        timeout_s: limit in seconds for each bucket; None is the group's own limit.

    Raises:
        RefusedError, RefusedTypeError: arguments of some rank are wrong (on every rank).
        MismatchError: ranks give tensors that do not fit each other.
        CommError: a reduction failed; see the subclasses.
    """
    state, refused = group_state(group), None
    buckets: list[list[torch.Tensor]] = []
    try:
        _check_tensors(tensors, op)
        if not state.is_alone:  # whose tensors may be fake ones, which lie nowhere
            _check_disjoint(tensors)
        buckets = fill_buckets(tensors, bucket_bytes)
    except (TypeError, ValueError) as error:
        refused = error  # told to the ranks that wait in their first bucket
    with torch.no_grad():
        for bucket in buckets or [[]]:
            flat = pack(bucket) if bucket else torch.empty(0, device=state.control_type)

            def run(flat: torch.Tensor = flat) -> torch.Tensor:
                return all_reduce_call(flat, op, state, timeout_s, refused=refused)

            reduced = launch(state, "all_reduce", run, inputs=[flat], async_op=False)
            for tensor, part in zip(bucket, unpack(reduced, bucket), strict=True):
                tensor.detach().copy_(part)  # of inference mode too


def fill_buckets(tensors: Iterable[T], bucket_bytes: int) -> list[list[T]]:
    """Share tensors out in their order; one dtype and device in each bucket.

    Raises:
        ValueError, TypeError: `bucket_bytes` is not a positive integer.
    """
    check_integer(bucket_bytes, "bucket_bytes")
    if bucket_bytes < 1:
        raise CommValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
    still_open: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    held_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    full: list[list[T]] = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if kind in still_open and held_bytes[kind] + tensor.nbytes > bucket_bytes:
            full.append(still_open.pop(kind))
        if kind not in still_open:
            still_open[kind], held_bytes[kind] = [], 0
        still_open[kind].append(tensor)
        held_bytes[kind] += tensor.nbytes
    return full + list(still_open.values())


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors in one new flat tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor in the shapes of those that were packed."""
    parts = flat.split([tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _check_tensors(tensors: Sequence[torch.Tensor], op: str) -> None:
    check_tensors(tensors)
    for i, tensor in enumerate(tensors):
        check_op(tensor.dtype, op)
        check_apart(tensor, f"tensors[{i}]")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise CommValueError("a tensor occurs twice; give each one once")


def _check_disjoint(tensors: Sequence[torch.Tensor]) -> None:
    """What two views share would be reduced twice where they are in different buckets."""
    # Those with gaps may lie between each other's elements, as two columns do.
    whole = [i for i, tensor in enumerate(tensors) if tensor.numel() and tensor.is_contiguous()]
    whole.sort(key=lambda i: (str(tensors[i].device), tensors[i].data_ptr()))
    for one, next_one in pairwise(whole):
        before, after = tensors[one], tensors[next_one]
        ends_at = before.data_ptr() + before.nbytes
        if before.device == after.device and after.data_ptr() < ends_at:
            first, second = sorted((one, next_one))
            raise CommValueError(
                f"tensors[{first}] and tensors[{second}] share memory; give each element once"
            )
