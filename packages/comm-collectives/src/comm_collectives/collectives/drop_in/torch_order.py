"""Collectives with torch's names, argument order and outputs, for code that has them already.

The result is written into a tensor that is given, with any strides: elements outside the view stay
untouched, and it may share memory with the input. Raw gloo writes wrong values there, and takes an
input given in the output's place without a word. No gradients.

    from comm_collectives.collectives.drop_in.torch_order import all_to_all_single
    all_to_all_single(output, input, output_split_sizes, input_split_sizes)

Swapped tensors are noticed where their sizes fit only the other way round, where the output alone
needs a gradient, and where one rank's splits disagree with its peers'. If every rank swaps tensors
of equal sizes, nothing in them tells; the functions that return a new tensor have no such mistake.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.base import as_bytes, check_dense, dense, is_dense, new_tensor, num_bytes
from comm_collectives.call import Agreed, Call, pack_counts, unpack_counts
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import Handle, launch
from comm_collectives.call.signature import Argument
from comm_collectives.collectives import (
    all_gather_call,
    all_reduce_call,
    broadcast_call,
    reduce_scatter_call,
    row_arguments,
    swap,
)
from comm_collectives.collectives.drop_in.in_place import check_apart, mark_written, overlap, write
from comm_collectives.collectives.drop_in.swapped import (
    both_splits,
    check_output,
    compare_splits,
    same_rows,
    times,
)
from comm_collectives.errors import CommValueError

_OP_OF = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle[None] | None:
    """Send consecutive rows of `input` to each rank and write those received into `output`.

    Collective: every rank of the group must call. Every call compares the splits of all ranks.

    Args:
        output: [sum(output_split_sizes), ...], any strides; written, rows by source.
        input: [sum(input_split_sizes), ...], any strides; read before anything is written.
        output_split_sizes: rows from each rank; None (or empty) is evenly.
        input_split_sizes: rows for each rank; None (or empty) is evenly.
        group: None is the default group.
        async_op: return a Handle at once; its `wait` returns None when `output` is written.

    Raises:
        RefusedError, RefusedTypeError: the tensors or splits of some rank do not fit, or look
            swapped (on every rank).
        MismatchError: ranks differ in dtype, row shape or splits (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)

    def run() -> None:
        _all_to_all(output, input, output_split_sizes, input_split_sizes, state)

    return _launch(state, "all_to_all_single", run, output, input, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle[None] | None:
    """Write the inputs of all ranks into `output_tensor`, by rank.

    Collective: every rank of the group must call with an input of the same shape.

    Args:
        output_tensor: the inputs one after the other, [ranks * rows, ...], or stacked, [ranks,
            rows, ...]; any strides; written.
        input_tensor: [rows, ...] or without dims, any strides.
        group: None is the default group.
        async_op: return a Handle at once; its `wait` returns None when the output is written.

    Raises:
        RefusedError, RefusedTypeError: the tensors of some rank do not fit, or look swapped (on
            every rank).
        MismatchError: ranks differ in dtype or shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)

    def run() -> None:
        refused = _problem(output_tensor, input_tensor, times(state.size, "output", "input"))
        x = _rows(input_tensor)
        room = None
        if refused is None:
            room = new_tensor(output_tensor.shape, output_tensor.dtype, output_tensor.device)
            if output_tensor.is_contiguous() and not overlap(output_tensor, input_tensor):
                room = output_tensor.detach()
            room = room.view(state.size * len(x), *x.shape[1:])
        y = all_gather_call(
            x, state, None, name="all_gather_into_tensor", refused=refused, out=room
        )
        if y.data_ptr() == output_tensor.data_ptr():
            mark_written(output_tensor)
        else:
            write(output_tensor, y)

    return _launch(state, "all_gather_into_tensor", run, output_tensor, input_tensor, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle[None] | None:
    """Reduce `input` over the ranks and write this rank's part of the result into `output`.

    Collective: every rank of the group must call with the same shape, dtype and op. For how it is
    computed see `reduce_scatter`.

    Args:
        output: [rows, ...] or without dims, any strides; written.
        input: [ranks * rows, ...], or stacked, [ranks, rows, ...]; any strides.
        op: of `torch.distributed.ReduceOp` SUM, AVG, MIN, MAX, PRODUCT, or its name in lower case.
        group: None is the default group.
        async_op: return a Handle at once; its `wait` returns None when the output is written.

    Raises:
        RefusedError, RefusedTypeError: the tensors or the op of some rank do not fit, or the
            tensors look swapped (on every rank).
        MismatchError: ranks differ in shape, dtype or op (on every rank where compared).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)

    def run() -> None:
        fits = times(state.size, "input", "output")
        refused = _problem(output, input, lambda output, input: fits(input, output))
        name = "reduce_scatter_tensor"
        y = reduce_scatter_call(
            _rows(input), None, _op_name(op), state, None, name=name, refused=refused
        )
        write(output, y)

    return _launch(state, "reduce_scatter_tensor", run, output, input, async_op)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle[None] | None:
    """Reduce `tensor` over the ranks, in place.

    Collective: every rank of the group must call with the same shape, dtype and op.

    Args:
        tensor: any shape and strides; the dtypes are those of `comm_collectives.all_reduce`.
        op: of `torch.distributed.ReduceOp` SUM, AVG, MIN, MAX, PRODUCT, or its name in lower case.
        group: None is the default group.
        async_op: return a Handle at once; its `wait` returns None when `tensor` is written.

    Raises:
        RefusedError: the op of some rank is unknown, or its elements share memory (on every rank).
        RefusedTypeError: the op is not defined for the dtype of some rank (on every rank).
        MismatchError: ranks differ in shape, dtype or op (on every rank where it is compared).
        CommError: the reduction failed; see the subclasses.
    """
    state = group_state(group)

    def run() -> None:
        refused = _problem_in_place(tensor)
        x = tensor if refused is not None else tensor.detach()
        write(tensor, all_reduce_call(x, _op_name(op), state, None, refused=refused))

    return _launch(state, "all_reduce", run, tensor, None, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle[None] | None:
    """Write the source's tensor into `tensor` on every other rank.

    Collective: every rank of the group must call, with a tensor of the same shape and dtype.

    Args:
        tensor: any shape, dtype and strides.
        src: global rank of the source, as in torch.
        group: None is the default group.
        async_op: return a Handle at once; its `wait` returns None when `tensor` is written.
        group_src: the source's rank inside the group, instead of `src`.

    Raises:
        RefusedError: the source is not a rank of the group, not given, or given twice; elements of
            a tensor share memory (on every rank).
        RefusedTypeError: a tensor is not dense or of a plain dtype (on every rank).
        MismatchError: ranks differ in the source, dtype or shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)

    def run() -> None:
        refused = _problem_in_place(tensor)
        root = 0
        try:
            root = _root(state, src, group_src)
        except ValueError as error:
            refused = refused or error
        x = tensor if refused is not None else tensor.detach()
        got = broadcast_call(x, root, None, state, None, refused=refused)
        if state.rank != root:
            write(tensor, got.y)

    return _launch(state, "broadcast", run, tensor, None, async_op)


def _all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    state: GroupState,
) -> None:
    refused = _problem(output, input, same_rows)
    sent = received = (0,) * state.size
    arguments: tuple[Argument, ...] = ()
    if refused is None:
        arguments = row_arguments(state, input)
        try:
            sent, received = both_splits(output, input, output_splits, input_splits, state.size)
        except (TypeError, ValueError) as error:
            refused = error
    call = Call(state, "all_to_all_single", arguments=arguments)
    if refused is not None:
        call.meet(refused=refused)
    x = dense(input)
    fits = output.is_contiguous() and not overlap(output, x)
    room = output.detach() if fits else new_tensor(output.shape, output.dtype, output.device)

    def checked_room(agreed: Agreed) -> torch.Tensor:
        compare_splits(call, [unpack_counts(part) for part in agreed.parts])
        return as_bytes(room)

    row_bytes = num_bytes(x.dtype, x.shape[1:])
    parts = [pack_counts([*sent, *received])] * state.size
    swap(call, as_bytes(x), [n * row_bytes for n in sent], checked_room, parts=parts)
    if fits:
        mark_written(output)
    else:
        write(output, room)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without history and with rows; anything else as it is, to be refused."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach() if x.dim() else x.detach().reshape(1)


def _problem(
    output: torch.Tensor, input: torch.Tensor, fits: Callable[[torch.Tensor, torch.Tensor], str]
) -> ValueError | TypeError | None:
    try:
        check_output(output, input, fits)
    except (TypeError, ValueError) as error:
        return error
    return None


def _problem_in_place(tensor: torch.Tensor) -> ValueError | TypeError | None:
    try:
        check_dense(tensor, "tensor")
        check_apart(tensor, "tensor")
    except (TypeError, ValueError) as error:
        return error
    return None


def _op_name(op: Any) -> str:
    for theirs, name in _OP_OF:
        if op == theirs:
            return name
    return str(op)


def _root(state: GroupState, src: int | None, group_src: int | None) -> int:
    """Return the rank inside the group that both ways to name a source mean."""
    if (src is None) == (group_src is None):
        raise CommValueError(
            f"src={src} and group_src={group_src}; give one of them: src is a global rank, "
            "group_src one inside the group"
        )
    if group_src is not None:
        return group_src
    if src not in state.ranks:
        raise CommValueError(f"src={src} is not one of the global ranks {state.ranks} of the group")
    return state.ranks.index(src)


def _launch(
    state: GroupState,
    name: str,
    run: Callable[[], None],
    output: torch.Tensor,
    input: torch.Tensor | None,
    async_op: bool,
) -> Handle[None] | None:
    """Run a call, watching the input unless the call itself changes it."""
    given = [x for x in (output, input) if isinstance(x, torch.Tensor)]
    usable = [x for x in given if is_dense(x)]
    # Empty ones keep the memory alive, and do not see it change.
    kept = [x.data.as_strided((0,), (1,)) for x in usable]
    if len(usable) == 2 and not overlap(*usable):
        kept[1] = usable[1]
    return launch(state, name, run, inputs=kept, async_op=async_op)  # type: ignore[no-any-return]
