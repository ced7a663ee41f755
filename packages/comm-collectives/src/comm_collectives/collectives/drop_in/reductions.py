"""Torch's reductions, into the tensor that is given, with any strides.

Results are the same bits on every rank; `comm_collectives.all_reduce` says how they are computed.

    all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    reduce(tensor, dst=0)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, dense, from_bytes
from comm_collectives.call import Checks, Refusal
from comm_collectives.call.groups import Group, GroupState
from comm_collectives.call.signature import Argument
from comm_collectives.collectives import all_gather_call, all_reduce_call, reduce_scatter_call
from comm_collectives.collectives.drop_in.in_place import check_written, write
from comm_collectives.collectives.drop_in.moves import as_list, check_list, rank_of, rows_of
from comm_collectives.collectives.drop_in.swapped import check_output, times
from comm_collectives.collectives.drop_in.works import CallWork, op_name, run_call
from comm_collectives.errors import CommTypeError, CommValueError

_OF_COMPLEX = ("sum", "avg")


@graph_break
def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Reduce `tensor` over the ranks, in place.

    Collective: every rank of the group must call with the same shape, dtype and op.

    Args:
        tensor: any shape and strides; the dtypes are those of `comm_collectives.all_reduce`. A
            sparse one (COO) is summed, and then has the union of the ranks' places.
        op: of `torch.distributed.ReduceOp` all but PREMUL_SUM, or its name in lower case. The
            PRODUCT of complex tensors is refused, as by torch; by its name it is computed.
        group: None is the default group.
        async_op: return a Work at once; its `wait` returns when `tensor` is written.

    Raises:
        RefusedError: the op of some rank is unknown, or its elements share memory (on every rank).
        RefusedTypeError: the op is not defined for the dtype of some rank (on every rank).
        MismatchError: ranks differ in shape, dtype or op (on every rank where it is compared).
        CommError: the reduction failed; see the subclasses.
    """

    def run(state: GroupState) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
            _add_sparse(tensor, op_name(op), state)
        else:
            _reduce_in_place([tensor], op, state)

    return run_call("all_reduce", group, run, outputs=[tensor], async_op=async_op)


@graph_break
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> CallWork | None:
    """As `all_reduce`, with the result on one rank; the tensors of others stay as they are.

    Collective: every rank of the group must call. The destination is the global rank `dst` or the
    rank `group_dst` inside the group. Raises as `all_reduce`.
    """

    def run(state: GroupState) -> None:
        root = -1
        with Checks() as checks:
            root = rank_of(state, "dst", dst, group_dst, None)
        _reduce_in_place([tensor], op, state, root=root, refused=checks.refused)

    return run_call("reduce", group, run, outputs=[tensor], async_op=async_op)


@graph_break
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> "torch.futures.Future[list[torch.Tensor]] | None":
    """As `all_reduce` of each of the tensors. Collective. With `async_op` a future, as torch's."""
    given = as_list(tensors)

    def run(state: GroupState) -> None:
        _reduce_in_place(given, op, state)

    work = run_call("all_reduce_coalesced", group, run, outputs=given, async_op=async_op)
    return None if work is None else work.get_future()


@graph_break
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Reduce `input` over the ranks and write this rank's part of the result into `output`.

    Collective: every rank of the group must call with the same shape, dtype and op. For how it is
    computed see `reduce_scatter`.

    Args:
        output: [rows, ...] or without dims, any strides; written.
        input: [ranks * rows, ...], or stacked, [ranks, rows, ...]; any strides.
        op: of `torch.distributed.ReduceOp` all but PREMUL_SUM, or its name in lower case.
        group: None is the default group.
        async_op: return a Work at once; its `wait` returns when the output is written.

    Raises:
        RefusedError, RefusedTypeError: the tensors or the op of some rank do not fit, or the
            tensors look swapped (on every rank).
        MismatchError: ranks differ in shape, dtype or op (on every rank where compared).
        CommError: the exchange failed; see the subclasses.
    """

    def run(state: GroupState) -> None:
        fits, name = times(state.size, "input", "output"), "reduce_scatter_tensor"
        with Checks() as checks:
            check_output(output, input, lambda output, input: fits(input, output))
        y = reduce_scatter_call(
            rows_of(input), None, op_name(op), state, None, name=name, refused=checks.refused
        )
        write(output, y)

    return run_call(
        "reduce_scatter_tensor", group, run, outputs=[output], inputs=[input], async_op=async_op
    )


@graph_break
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Reduce tensor r of the lists over the ranks and write it into the output of rank r.

    Collective: every rank of the group must call with lists of the same sizes. For ops and how they
    are computed see `reduce_scatter_tensor`.
    """

    def run(state: GroupState) -> None:
        splits, x = [0] * state.size, output
        with Checks() as checks:
            check_list(input_list, "input_list", state.size)
            check_written(output, "output")
            splits = [item.numel() for item in input_list]
            _check_part(output, input_list, splits[state.rank])
            flat = torch.cat([as_bytes(dense(item)) for item in input_list])
            x = from_bytes(flat, output.dtype, (sum(splits),))
        name = "reduce_scatter"
        y = reduce_scatter_call(
            x, splits, op_name(op), state, None, name=name, refused=checks.refused
        )
        write(output, y)

    return run_call(
        "reduce_scatter", group, run, outputs=[output], inputs=input_list, async_op=async_op
    )


def _reduce_in_place(
    tensors: Sequence[torch.Tensor],
    op: Any,
    state: GroupState,
    *,
    root: int | None = None,
    refused: Refusal = None,
) -> None:
    """Reduce each tensor; the results are written on the root, or on every rank for None."""
    for tensor in tensors:
        x = tensor
        with Checks(refused) as checks:
            check_written(tensor)
            if root is None:
                _check_complex(tensor, op)
            x = tensor.detach()
        name = "all_reduce" if root is None else "reduce"
        y = all_reduce_call(
            x, op_name(op), state, None, name=name, root=root, refused=checks.refused
        )
        if root is None or root == state.rank:
            write(tensor, y)


def _check_complex(tensor: torch.Tensor, op: Any) -> None:
    """Refuse what torch refuses, since code may rely on it; an op that is given by name is ours."""
    if tensor.is_complex() and not isinstance(op, str) and op_name(op) not in _OF_COMPLEX:
        raise CommTypeError(f"all_reduce does not support {op} on complex tensors")


def _add_sparse(tensor: torch.Tensor, op: str, state: GroupState) -> None:
    """Sum tensors of coordinates and values over the ranks, in place."""
    with Checks() as checks:
        if op != "sum":
            raise CommTypeError(f"op={op!r} is not defined for sparse tensors; give sum")
        checks.arguments = (
            Argument.of_dtype(tensor.dtype),
            Argument.of_shape("shape", tensor.shape),
            Argument("sparse_dim", tensor.sparse_dim()),
        )
    checks.call(state, "all_reduce").meet()  # the gathers compare less: places may be of any shape
    parts = tensor.detach().coalesce()
    places = all_gather_call(parts.indices().t(), state, None, name="all_reduce")
    values = all_gather_call(parts.values(), state, None, name="all_reduce")
    total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=False)
    tensor.copy_(total.coalesce())


def _check_part(output: torch.Tensor, inputs: Sequence[torch.Tensor], expected: int) -> None:
    dtypes = {x.dtype for x in (output, *inputs)}
    if len(dtypes) > 1:
        raise CommTypeError(f"tensors are of several dtypes, {sorted(map(str, dtypes))}; use one")
    if output.numel() != expected:
        raise CommValueError(
            f"output has {output.numel()} elements, and tensor of input_list for this rank "
            f"{expected}; make them equal"
        )
