"""All-to-all of rows: right for every dtype, stride and split, differentiable, hard to misuse.

The input is the only tensor argument and the output is new, where torch's takes the output first,
and on gloo refuses many dtypes and writes wrong values into strided outputs. Rows travel as bytes.

    y = all_to_all(x, input_splits=[2, 0, 5])   # rows 0-1 to rank 0, none to rank 1, 2-6 to rank 2
"""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Unpack, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, dense, from_bytes, new_tensor, num_bytes
from comm_collectives.call import Agreed, Call, Checks, pack_counts, unpack_counts
from comm_collectives.call.autograd import Back, Gradients, attach, wants_grad
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch
from comm_collectives.call.signature import Argument, Status
from comm_collectives.collectives.exchange import exchange_rows, on_host, swap
from comm_collectives.collectives.pieces import check_rows, row_arguments
from comm_collectives.errors import CommTypeError, CommValueError, MismatchError

_Splits = Sequence[int] | None
_Counts = tuple[int, ...]
_MAKE_EQUAL = "; make input_splits and output_splits equal, or leave output_splits out"
_Table = Sequence[Sequence[int]]  # by rank, numbers for each rank


@overload
def all_to_all(
    x: torch.Tensor,
    *,
    input_splits: _Splits = ...,
    output_splits: _Splits = ...,
    **options: Unpack[CallNow],
) -> torch.Tensor: ...
@overload
def all_to_all(
    x: torch.Tensor,
    *,
    input_splits: _Splits = ...,
    output_splits: _Splits = ...,
    **options: Unpack[CallLater],
) -> Handle[torch.Tensor]: ...
@graph_break
def all_to_all(
    x: torch.Tensor,
    *,
    input_splits: _Splits = None,
    output_splits: _Splits = None,
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Send consecutive rows of `x` to each rank and return the rows received, by source rank.

    Collective: every rank of the group must call, also one without rows. Differentiable; the
    backward is an all-to-all in the other direction, in which every rank takes part. All of it
    is one exchange, also where the peers are asked how many rows come.

    Args:
        x: [rows, ...], any plain dtype, any strides; not modified. The trailing shape and the dtype
            are the same on every rank.
        input_splits: rows for each rank, summing to `rows`; None splits evenly.
        output_splits: rows from each rank; None asks the peers. Give them on all ranks or on none.
        group: None is the default group.
        timeout_s: limit in seconds for each exchange; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the rows.

    Returns:
        New tensor [sum(output_splits), ...] of the dtype and device of `x`.

    Raises:
        RefusedError: the splits of some rank do not fit its `x` or the group (on every rank).
        RefusedTypeError: some rank's `x` is not a dense tensor of a plain dtype (on every rank).
        MismatchError: ranks differ in dtype, trailing shape or splits (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)

    run = partial(_all_to_all, x, input_splits, output_splits, state, timeout_s)
    return launch(state, "all_to_all", run, inputs=[x], async_op=async_op)  # type: ignore[no-any-return]


def checked_splits(splits: Sequence[int], size: int, name: str) -> tuple[int, ...]:
    """Return `splits` as integers, one for each of `size` ranks.

    Raises:
        TypeError: they are not integers.
        ValueError: there are not as many as ranks, or one is negative.
    """
    try:
        checked = tuple(index(n) for n in splits)
    except TypeError as error:
        raise CommTypeError(f"{name}={splits!r} must be a sequence of integers") from error
    if len(checked) != size or any(n < 0 for n in checked):
        raise CommValueError(
            f"{name}={list(checked)} must hold {size} row counts >= 0, one per rank of the group"
        )
    return checked


def row_splits(rows: int, splits: _Splits, size: int, name: str) -> tuple[int, ...]:
    """Return how many of `rows` go to each of `size` ranks; None shares them out evenly.

    Raises:
        TypeError: the splits are not integers.
        ValueError: they do not fit the rows or the group.
    """
    if splits is None:
        if rows % size:
            raise CommValueError(
                f"x has {rows} rows, which {size} ranks cannot share evenly; give {name}"
            )
        return (rows // size,) * size
    checked = checked_splits(splits, size, name)
    if sum(checked) != rows:
        raise CommValueError(
            f"{name}={list(checked)} sum to {sum(checked)} but x has {rows} rows; "
            "make them cover x exactly"
        )
    return checked


def first_difference(sent: _Table, expected: _Table) -> tuple[int, int] | None:
    """Return the first source and destination where `expected[dst][src]` is not what is sent."""
    for src, row in enumerate(sent):
        for dst, count in enumerate(row):
            if count != expected[dst][src]:
                return src, dst
    return None


def compare_splits(call: Call, agreed: Agreed, *, unit: str = "rows", remedy: str = "") -> None:
    """Check that what each rank sends is what its peer expects; every rank sees all of it.

    Each rank told, packed, how many of `unit` it sends to each and then how many it expects of
    each. Without a remedy the text says whose tensors may be swapped; those of lists are no rows.

    Raises:
        MismatchError: it is not.
    """
    ranks, size = call.state.ranks, call.state.size
    rows = [unpack_counts(part) for part in agreed.parts]
    sent, expected = [row[:size] for row in rows], [row[size:] for row in rows]
    wrong = first_difference(sent, expected)
    if wrong is None:
        return
    src, dst = wrong
    if not remedy and unit == "rows":
        remedy = _swapped(sent, expected, ranks)
    raise MismatchError(
        f"{call}: rank {ranks[src]} sends {sent[src][dst]} {unit} to rank {ranks[dst]}, which "
        f"expects {expected[dst][src]}{remedy} (at {call.site.text})"
    )


def _swapped(sent: _Table, expected: _Table, ranks: Sequence[int]) -> str:
    """Say for which ranks all would fit if they had given their tensors the other way round."""
    suspects = []
    for rank, name in enumerate(ranks):
        turned_sent = [*sent[:rank], expected[rank], *sent[rank + 1 :]]
        turned_expected = [*expected[:rank], sent[rank], *expected[rank + 1 :]]
        if first_difference(turned_sent, turned_expected) is None:
            suspects.append(f"rank {name}")
    if not suspects:
        return ""
    return (
        f"; all fit if {' or '.join(suspects)} gave input and its splits in output's place, "
        "which comes first"
    )


def _all_to_all(
    x: torch.Tensor,
    input_splits: _Splits,
    output_splits: _Splits,
    state: GroupState,
    timeout_s: float | None,
) -> torch.Tensor:
    with Checks() as checks:
        check_rows(x, "all_to_all")
        sent = row_splits(len(x), input_splits, state.size, "input_splits")
        expected = None
        if output_splits is not None:
            expected = checked_splits(output_splits, state.size, "output_splits")
        given = Argument("output_splits given", expected is not None)
        checks.arguments = (*row_arguments(state, x), given)
    call = checks.call(state, "all_to_all", timeout_s)
    flags = Status.WANTS_GRAD if wants_grad(x) else 0
    if expected is None or on_host(state, x.device) or call.is_due():
        flags, y, received = _swap_rows(call, x, sent, expected, flags)
    else:
        received = expected
        y = new_tensor((sum(received), *x.shape[1:]), x.dtype, x.device)
        exchange_rows(call, dense(x), sent, received, y)
    if not flags & Status.WANTS_GRAD:
        return y
    shape = x.shape

    def back(grads: Gradients, call: Call) -> Gradients:
        rows = new_tensor(shape, grads[0].dtype, grads[0].device)
        exchange_rows(call, grads[0], received, sent, rows)
        return (rows,)

    return attach((x,), (y,), call, Back(run=back))[0]


def _swap_rows(
    call: Call, x: torch.Tensor, sent: _Counts, expected: _Counts | None, flags: int
) -> tuple[int, torch.Tensor, _Counts]:
    """Agree and exchange; return the flags of all, the rows, and how many came from each rank."""
    row_shape, row_bytes = x.shape[1:], num_bytes(x.dtype, x.shape[1:])

    def counts(agreed: Agreed) -> _Counts:
        return expected or tuple(unpack_counts(part)[0] for part in agreed.parts)

    def room(agreed: Agreed) -> torch.Tensor:
        if expected is not None and not call.state.is_alone:
            compare_splits(call, agreed, remedy=_MAKE_EQUAL)
        return as_bytes(new_tensor((sum(counts(agreed)), *row_shape), x.dtype, x.device))

    if expected is None:
        parts = [pack_counts([n]) for n in sent]
    else:
        parts = [pack_counts([*sent, *expected])] * call.state.size
    sizes = [n * row_bytes for n in sent]
    coming = None if expected is None else [n * row_bytes for n in expected]
    agreed, flat = swap(
        call, as_bytes(dense(x)), sizes, room, parts=parts, status=flags, received=coming
    )
    received = counts(agreed)
    return agreed.flags, from_bytes(flat, x.dtype, (sum(received), *row_shape)), received
