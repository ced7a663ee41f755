"""Torch's functions of lists of tensors, one for each rank: any shapes, dtypes and strides.

Raw gloo refuses lists whose tensors differ in size, and most dtypes.

    all_to_all(output_tensor_list, input_tensor_list)
    gather(tensor, gather_list if rank == 0 else None, dst=0)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_dense, new_tensor
from comm_collectives.call import Checks
from comm_collectives.call.groups import Group, GroupState
from comm_collectives.collectives.drop_in.in_place import check_written
from comm_collectives.collectives.drop_in.moves import as_list, check_list, move, rank_of
from comm_collectives.collectives.drop_in.works import CallWork, run_call
from comm_collectives.errors import CommValueError

_List = Sequence[torch.Tensor]


@graph_break
def all_to_all(
    output_tensor_list: _List,
    input_tensor_list: _List,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Send tensor r of the inputs to rank r and write that of rank r into output r.

    Collective: every rank of the group must call. Tensors may be of any sizes, but those of sender
    and receiver have as many elements. Raises as `all_to_all_single`.
    """

    def run(state: GroupState) -> None:
        with Checks() as checks:
            check_list(input_tensor_list, "input_tensor_list", state.size)
            check_list(output_tensor_list, "output_tensor_list", state.size, written=True)
        move("all_to_all", state, input_tensor_list, output_tensor_list, refused=checks.refused)

    outputs, inputs = output_tensor_list, input_tensor_list
    return run_call("all_to_all", group, run, outputs=outputs, inputs=inputs, async_op=async_op)


@graph_break
def all_gather(
    tensor_list: _List,
    tensor: torch.Tensor,
    group: Group | None = None,
    async_op: bool = False,
) -> CallWork | None:
    """Write the tensor of rank r into tensor r of the list, on every rank.

    Collective: every rank of the group must call; the tensors of the ranks may be of any sizes.
    Raises as `all_to_all_single`.
    """

    def run(state: GroupState) -> None:
        with Checks() as checks:
            check_dense(tensor, "tensor")
            check_list(tensor_list, "tensor_list", state.size, written=True)
        move("all_gather", state, [tensor] * state.size, tensor_list, refused=checks.refused)

    return run_call(
        "all_gather", group, run, outputs=tensor_list, inputs=[tensor], async_op=async_op
    )


@graph_break
def gather(
    tensor: torch.Tensor,
    gather_list: _List | None = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> CallWork | None:
    """Write the tensor of rank r into tensor r of the list, on the destination.

    Collective: every rank of the group must call. The destination is the global rank `dst` or the
    rank `group_dst` inside the group, else the first; the list is given there alone. Raises as
    `all_to_all_single`.
    """

    def run(state: GroupState) -> None:
        root, parts = 0, _Parts()
        with Checks() as checks:
            root = rank_of(state, "dst", dst, group_dst, 0)
            _check_root_list(state, root, gather_list, "gather_list", written=True)
            check_dense(tensor, "tensor")
            parts = _Parts.of(tensor, gather_list, root, state)
        move("gather", state, parts.one, parts.each, root=root, refused=checks.refused)

    outputs = gather_list
    return run_call("gather", group, run, outputs=outputs, inputs=[tensor], async_op=async_op)


@graph_break
def scatter(
    tensor: torch.Tensor,
    scatter_list: _List | None = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> CallWork | None:
    """Write tensor r of the source's list into the tensor of rank r.

    Collective: every rank of the group must call. The source is the global rank `src` or the rank
    `group_src` inside the group, else the first; the list is given there alone. Raises as
    `all_to_all_single`.
    """

    def run(state: GroupState) -> None:
        root, parts = 0, _Parts()
        with Checks() as checks:
            root = rank_of(state, "src", src, group_src, 0)
            _check_root_list(state, root, scatter_list, "scatter_list")
            check_written(tensor)
            parts = _Parts.of(tensor, scatter_list, root, state)
        move("scatter", state, parts.each, parts.one, root=root, refused=checks.refused)

    inputs = scatter_list
    return run_call("scatter", group, run, outputs=[tensor], inputs=inputs, async_op=async_op)


@graph_break
def all_gather_coalesced(
    output_tensor_lists: Sequence[_List],
    input_tensor_list: _List,
    group: Group | None = None,
    async_op: bool = False,
) -> "torch.futures.Future[list[list[torch.Tensor]]] | None":
    """Write input i of rank r into output [r][i], on every rank.

    Collective: every rank of the group must call. With `async_op` a future of the outputs, as
    torch's. Raises as `all_to_all_single`.
    """
    lists = as_list(output_tensor_lists)
    outputs, inputs = [as_list(row) for row in lists], as_list(input_tensor_list)

    def run(state: GroupState) -> None:
        for i, x in enumerate(inputs):
            row = [listed[i] for listed in outputs if len(listed) == len(inputs)]
            with Checks() as checks:
                check_list(row, f"output_tensor_lists for input {i}", state.size, written=True)
                check_dense(x, f"input_tensor_list[{i}]")
            move("all_gather_coalesced", state, [x] * state.size, row, refused=checks.refused)

    work = run_call(
        "all_gather_coalesced",
        group,
        run,
        outputs=list(chain(*outputs)),
        inputs=inputs,
        async_op=async_op,
        results=lists,
    )
    return None if work is None else work.get_future()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """By rank, the tensor that each gives to or takes from the root alone, and what that has."""

    one: _List = ()
    each: _List = ()

    @staticmethod
    def of(tensor: torch.Tensor, listed: _List | None, root: int, state: GroupState) -> "_Parts":
        nothing = new_tensor((0,), tensor.dtype, tensor.device)
        one = [tensor if r == root else nothing for r in range(state.size)]
        return _Parts(one=one, each=listed or [nothing] * state.size)


def _check_root_list(
    state: GroupState, root: int, tensors: _List | None, name: str, *, written: bool = False
) -> None:
    """Check the list that the root alone gives."""
    if state.rank == root:
        check_list(tensors, name, state.size, written=written)
    elif isinstance(tensors, torch.Tensor) or tensors:
        there = state.ranks[root]
        raise CommValueError(f"{name} is for rank {there} alone; leave it out here")
