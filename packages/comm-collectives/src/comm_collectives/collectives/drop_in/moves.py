"""Tensors from each rank to each rank, into tensors that are given: all that moves without sums.

Each rank says how many elements it sends to every other and how many it expects of each; every rank
compares all of it before anything is written.

    move("all_to_all", state, inputs, outputs)     # inputs[r] goes to rank r
"""

from collections.abc import Sequence
from typing import Any

import torch

from comm_collectives.base import as_bytes, check_apart, check_dense, dense, from_bytes, new_tensor
from comm_collectives.call import Agreed, Checks, Refusal, pack_counts
from comm_collectives.call.groups import GroupState, check_integer, wire_device_argument
from comm_collectives.call.signature import Argument
from comm_collectives.collectives import compare_splits, swap
from comm_collectives.collectives.drop_in.in_place import write
from comm_collectives.errors import CommTypeError, CommValueError


def move(
    name: str,
    state: GroupState,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    root: int = 0,
    refused: Refusal = None,
) -> None:
    """Send `inputs[r]` to rank r and write what comes from it into `outputs[r]`. Collective.

    Args:
        inputs: for each rank; one without elements sends nothing. All of one dtype.
        outputs: for each rank; any strides, also over the memory of inputs.
        root: what the ranks agree on besides.
        refused: what is wrong on this rank.
    """
    with Checks(refused) as checks:
        if refused is None:
            dtype, device = _one_kind((*inputs, *outputs))
            checks.arguments = (
                Argument.of_dtype(dtype),
                wire_device_argument(state, device),
                Argument("root", root),
            )
    call = checks.call(state, name)
    sent, received = [x.numel() for x in inputs], [y.numel() for y in outputs]
    flat = torch.cat([as_bytes(dense(x)) for x in inputs])

    def compared(agreed: Agreed) -> torch.Tensor:
        compare_splits(call, agreed, unit="elements")
        return as_bytes(new_tensor((sum(received),), dtype, device))

    parts = [pack_counts([*sent, *received])] * state.size
    _, got = swap(call, flat, [n * dtype.itemsize for n in sent], compared, parts=parts)
    pieces = from_bytes(got, dtype, (sum(received),)).split(received)
    for output, piece in zip(outputs, pieces, strict=True):
        if output.numel():
            write(output, piece)


def as_list(given: Any) -> Sequence[Any]:
    """Return one tensor, or what is to be refused, as a list of it."""
    return given if isinstance(given, list | tuple) else [given]


def check_list(tensors: object, name: str, size: int, *, written: bool = False) -> None:
    """Check that an argument is a list of one dense tensor for each rank.

    Raises:
        TypeError, ValueError: it is not, or some are `written` and share memory inside.
    """
    if not isinstance(tensors, list | tuple):
        raise CommTypeError(f"{name} is a {type(tensors).__name__}; give a list of {size} tensors")
    if len(tensors) != size:
        raise CommValueError(f"{name} has {len(tensors)} tensors; give one for each of {size}")
    for i, tensor in enumerate(tensors):
        check_dense(tensor, f"{name}[{i}]")
        if written:
            check_apart(tensor, f"{name}[{i}]")


def rank_of(
    state: GroupState, name: str, root: int | None, group_root: int | None, default: int | None
) -> int:
    """Return the rank inside the group that both ways to name a root mean.

    Raises:
        ValueError: neither or both are given (neither has a default in some functions), or it is no
            rank of the group.
    """
    if root is None and group_root is None and default is not None:
        return default
    if (root is None) == (group_root is None):
        raise CommValueError(
            f"{name}={root} and group_{name}={group_root}; give one of them: {name} is a global "
            f"rank, group_{name} one inside the group"
        )
    given, found = root if group_root is None else group_root, group_root
    check_integer(given, name)
    if root is not None:
        found = state.ranks.index(root) if root in state.ranks else None
    if found is None or not 0 <= found < state.size:
        raise CommValueError(
            f"{name}={given} is not one of the global ranks {state.ranks} of the group"
        )
    return found


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without history and with rows; anything else as it is, to be refused."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach() if x.dim() else x.detach().reshape(1)


def _one_kind(tensors: Sequence[torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    dtypes, devices = {x.dtype for x in tensors}, {x.device for x in tensors}
    if len(dtypes) > 1:
        raise CommTypeError(f"tensors are of several dtypes, {sorted(map(str, dtypes))}; use one")
    if len(devices) > 1:
        raise CommValueError(f"tensors are on several devices, {sorted(map(str, devices))}")
    return dtypes.pop(), devices.pop()
