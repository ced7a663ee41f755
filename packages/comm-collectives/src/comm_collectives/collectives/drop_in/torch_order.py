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

from collections.abc import Sequence
from datetime import timedelta

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, dense, new_tensor, num_bytes
from comm_collectives.call import Agreed, Checks, pack_counts
from comm_collectives.call.groups import Group, GroupState
from comm_collectives.collectives import (
    all_gather_call,
    broadcast_call,
    compare_splits,
    row_arguments,
    swap,
)
from comm_collectives.collectives.drop_in.in_place import (
    check_written,
    mark_written,
    takes_bytes,
    write,
)
from comm_collectives.collectives.drop_in.moves import rank_of, rows_of
from comm_collectives.collectives.drop_in.swapped import (
    both_splits,
    check_output,
    same_rows,
    times,
)
from comm_collectives.collectives.drop_in.works import CallWork, run_call
from comm_collectives.errors import CollectiveTimeoutError, CommTypeError


@graph_break
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Send consecutive rows of `input` to each rank and write those received into `output`.

    Collective: every rank of the group must call. Every call compares the splits of all ranks.

    Args:
        output: [sum(output_split_sizes), ...], any strides; written, rows by source.
        input: [sum(input_split_sizes), ...], any strides; read before anything is written.
        output_split_sizes: rows from each rank; None (or empty) is evenly.
        input_split_sizes: rows for each rank; None (or empty) is evenly.
        group: None is the default group.
        async_op: return a Work at once; its `wait` returns when `output` is written.

    Raises:
        RefusedError, RefusedTypeError: the tensors or splits of some rank do not fit, or look
            swapped (on every rank).
        MismatchError: ranks differ in dtype, row shape or splits (on every rank).
        CommError: the exchange failed; see the subclasses.
    """

    def run(state: GroupState) -> None:
        _all_to_all(output, input, output_split_sizes, input_split_sizes, state)

    return run_call(
        "all_to_all_single", group, run, outputs=[output], inputs=[input], async_op=async_op
    )


@graph_break
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Write the inputs of all ranks into `output_tensor`, by rank.

    Collective: every rank of the group must call with an input of the same shape.

    Args:
        output_tensor: the inputs one after the other, [ranks * rows, ...], or stacked, [ranks,
            rows, ...]; any strides; written.
        input_tensor: [rows, ...] or without dims, any strides.
        group: None is the default group.
        async_op: return a Work at once; its `wait` returns when the output is written.

    Raises:
        RefusedError, RefusedTypeError: the tensors of some rank do not fit, or look swapped (on
            every rank).
        MismatchError: ranks differ in dtype or shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """

    def run(state: GroupState) -> None:
        x, room = rows_of(input_tensor), None
        with Checks() as checks:
            check_output(output_tensor, input_tensor, times(state.size, "output", "input"))
            room = new_tensor(output_tensor.shape, output_tensor.dtype, output_tensor.device)
            if takes_bytes(output_tensor, input_tensor):
                room = output_tensor.detach()
            room = room.view(state.size * len(x), *x.shape[1:])
        name = "all_gather_into_tensor"
        y = all_gather_call(x, state, None, name=name, refused=checks.refused, out=room)
        if y.data_ptr() == output_tensor.data_ptr():
            mark_written(output_tensor)
        else:
            write(output_tensor, y)

    return run_call(
        "all_gather_into_tensor",
        group,
        run,
        outputs=[output_tensor],
        inputs=[input_tensor],
        async_op=async_op,
    )


@graph_break
def barrier(
    group: Group | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> CallWork | None:
    """Wait until all ranks of the group are here. Collective; they may come from several lines.

    Args:
        group: None is the default group.
        async_op: return a Work at once; its `wait` returns when all ranks made this call.
        device_ids: not used, since the ranks meet on the host.
        timeout: how long this may take; None is the group's own limit.

    Raises:
        CollectiveTimeoutError, PeerFailedError: a rank did not come; the text names it.
        MismatchError: ranks make different calls (on every rank).
    """

    def run(state: GroupState) -> None:
        timeout_s = None
        with Checks() as checks:
            if not isinstance(timeout, timedelta | None):
                raise CommTypeError(f"timeout={timeout!r}; give a datetime.timedelta, or None")
            timeout_s = None if timeout is None else timeout.total_seconds()
        try:
            checks.call(state, "barrier", timeout_s, compares_site=False).meet()
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{error}; give a longer timeout to barrier if ranks may be late by more"
            ) from error

    return run_call("barrier", group, run, outputs=[], async_op=async_op)


@graph_break
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> CallWork | None:
    """Write the source's tensor into `tensor` on every other rank.

    Collective: every rank of the group must call, with a tensor of the same shape and dtype.

    Args:
        tensor: any shape, dtype and strides.
        src: global rank of the source, as in torch.
        group: None is the default group.
        async_op: return a Work at once; its `wait` returns when `tensor` is written.
        group_src: the source's rank inside the group, instead of `src`.

    Raises:
        RefusedError: the source is not a rank of the group, not given, or given twice; elements of
            a tensor share memory (on every rank).
        RefusedTypeError: a tensor is not dense or of a plain dtype (on every rank).
        MismatchError: ranks differ in the source, dtype or shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """

    def run(state: GroupState) -> None:
        root, x = 0, tensor
        with Checks() as checks:
            check_written(tensor)
            root = rank_of(state, "src", src, group_src, None)
            x = tensor.detach()
        got = broadcast_call(x, root, None, state, None, refused=checks.refused)
        if state.rank != root:
            write(tensor, got.y)

    return run_call("broadcast", group, run, outputs=[tensor], async_op=async_op)


def _all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    state: GroupState,
) -> None:
    with Checks() as checks:
        check_output(output, input, same_rows)
        checks.arguments = row_arguments(state, input)
        sent, received = both_splits(output, input, output_splits, input_splits, state.size)
    call = checks.call(state, "all_to_all_single")
    x = dense(input)
    fits = takes_bytes(output, x)
    room = output.detach() if fits else new_tensor(output.shape, output.dtype, output.device)

    def checked_room(agreed: Agreed) -> torch.Tensor:
        compare_splits(call, agreed)
        return as_bytes(room)

    row_bytes = num_bytes(x.dtype, x.shape[1:])
    parts = [pack_counts([*sent, *received])] * state.size
    swap(call, as_bytes(x), [n * row_bytes for n in sent], checked_room, parts=parts)
    if fits:
        mark_written(output)
    else:
        write(output, room)
