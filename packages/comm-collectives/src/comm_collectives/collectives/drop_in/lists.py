"""Torch's functions of lists of tensors, one for each rank: any shapes, dtypes and strides.

Raw gloo refuses lists whose tensors differ in size, and most dtypes.

    all_to_all(output_tensor_list, input_tensor_list)
    gather(tensor, gather_list if rank == 0 else None, dst=0)
"""

from collections.abc import Sequence

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import new_tensor
from comm_collectives.call import Refusal
from comm_collectives.call.groups import Group, GroupState
from comm_collectives.collectives.drop_in.moves import (
    move,
    problem_in_place,
    problem_of_list,
    rank_of,
)
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
        refused = problem_of_list(input_tensor_list, "input_tensor_list", state.size)
        name = "output_tensor_list"
        refused = refused or problem_of_list(output_tensor_list, name, state.size, written=True)
        move("all_to_all", state, input_tensor_list, output_tensor_list, refused=refused)

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
        refused = problem_of_list([tensor] * state.size, "tensor", state.size)
        refused = refused or problem_of_list(tensor_list, "tensor_list", state.size, written=True)
        move("all_gather", state, [tensor] * state.size, tensor_list, refused=refused)

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
        root, refused = _rooted(state, "dst", dst, group_dst, gather_list, "gather_list")
        refused = refused or problem_of_list([tensor], "tensor", 1)
        nothing = _nothing(tensor) if refused is None else torch.empty(0)
        sent = [tensor if r == root else nothing for r in range(state.size)]
        taken = gather_list if state.rank == root and gather_list else [nothing] * state.size
        move("gather", state, sent, taken, root=root, refused=refused)

    outputs = gather_list or ()
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
        root, refused = _rooted(state, "src", src, group_src, scatter_list, "scatter_list")
        refused = refused or problem_in_place(tensor)
        nothing = _nothing(tensor) if refused is None else torch.empty(0)
        sent = scatter_list if state.rank == root and scatter_list else [nothing] * state.size
        taken = [tensor if r == root else nothing for r in range(state.size)]
        move("scatter", state, sent, taken, root=root, refused=refused)

    inputs = scatter_list or ()
    return run_call("scatter", group, run, outputs=[tensor], inputs=inputs, async_op=async_op)


@graph_break
def all_gather_coalesced(
    output_tensor_lists: Sequence[_List],
    input_tensor_list: _List,
    group: Group | None = None,
    async_op: bool = False,
) -> "torch.futures.Future[list[torch.Tensor]] | None":
    """Write input i of rank r into output [r][i], on every rank.

    Collective: every rank of the group must call. With `async_op` a future, as torch's.
    """
    flat = [item for row in output_tensor_lists for item in row]

    def run(state: GroupState) -> None:
        number = len(input_tensor_list)
        name = "output_tensor_lists"
        refused = problem_of_list(flat, name, state.size * number, written=True)
        for i, x in enumerate(input_tensor_list):
            found = refused or problem_of_list([x], f"input_tensor_list[{i}]", 1)
            row = [x] if found else [outputs[i] for outputs in output_tensor_lists]
            move("all_gather_coalesced", state, [x] * state.size, row, refused=found)

    work = run_call(
        "all_gather_coalesced",
        group,
        run,
        outputs=flat,
        inputs=input_tensor_list,
        async_op=async_op,
    )
    return None if work is None else work.get_future()


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    return new_tensor((0,), tensor.dtype, tensor.device)


def _rooted(
    state: GroupState,
    name: str,
    root: int | None,
    group_root: int | None,
    tensors: _List | None,
    list_name: str,
) -> tuple[int, Refusal]:
    """Return the root, and what is wrong with it or with the list that it alone gives."""
    try:
        found = rank_of(state, name, root, group_root, 0)
    except ValueError as error:
        return 0, error
    if state.rank == found:
        return found, problem_of_list(tensors, list_name, state.size, written=name == "dst")
    if tensors:
        there = state.ranks[found]
        return found, CommValueError(f"{list_name} is for rank {there} alone; leave it out here")
    return found, None
