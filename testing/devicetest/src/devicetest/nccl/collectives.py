"""The collectives of `NcclRuleGroup`, by the names under which torch calls a group's.

dist.all_reduce(x, group=group)       # group.allreduce([x], opts)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from devicetest.nccl.exchange import NcclRuleError
from devicetest.nccl.group import NcclRuleGroup, Tensors, bytes_of


def all_reduce(group: NcclRuleGroup, tensors: Tensors, opts: Any) -> Any:
    """As torch's; several tensors are one call."""
    if len(tensors) != 1:
        return _together(group, tensors, lambda x: all_reduce(group, [x], opts))
    terms = _reduction(group, tensors[0], opts)
    return group.collective("all_reduce", terms, [bytes_of(tensors[0])], tensors, tensors)


def broadcast(group: NcclRuleGroup, tensors: Tensors, opts: Any) -> Any:
    """As torch's."""
    (tensor,) = tensors
    root = opts.rootRank
    given = [bytes_of(tensor)] if root == group.rank() else []
    terms = (_name(tensor), tensor.numel(), root)
    return group.collective("broadcast", terms, given, tensors, tensors)


def reduce(group: NcclRuleGroup, tensors: Tensors, opts: Any) -> Any:
    """As torch's."""
    (tensor,) = tensors
    terms = (*_reduction(group, tensor, opts), opts.rootRank)
    fills = tensors if opts.rootRank == group.rank() else ()
    return group.collective("reduce", terms, [bytes_of(tensor)], tensors, fills)


def all_gather(group: NcclRuleGroup, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
    """As torch's, into a list."""
    (targets,), (given,) = outputs, inputs
    terms = (_name(given), given.numel())
    return group.collective("all_gather", terms, [bytes_of(given)], inputs, targets)


def all_gather_single(group: NcclRuleGroup, output: Any, given: Any, opts: Any = None) -> Any:
    """As torch's, into one tensor."""
    return all_gather(group, [_parts(group, output)], [given], opts)


def all_gather_coalesced(
    group: NcclRuleGroup, outputs: Tensors, inputs: Tensors, opts: Any = None
) -> Any:
    """Several gathers as one call."""
    pairs = list(zip(outputs, inputs, strict=True))
    return _together(group, pairs, lambda pair: all_gather_single(group, pair[0], pair[1], opts))


def gather(group: NcclRuleGroup, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
    """As torch's."""
    (given,) = inputs
    targets = outputs[0] if opts.rootRank == group.rank() else ()
    terms = (_name(given), given.numel(), opts.rootRank)
    return group.collective("gather", terms, [bytes_of(given)], inputs, targets)


def scatter(group: NcclRuleGroup, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
    """As torch's."""
    given = inputs[0] if opts.rootRank == group.rank() else ()
    terms = (_name(outputs[0]), outputs[0].numel(), opts.rootRank)
    return group.collective("scatter", terms, list(map(bytes_of, given)), given, outputs)


def reduce_scatter(
    group: NcclRuleGroup, outputs: Tensors, inputs: Sequence[Tensors], opts: Any
) -> Any:
    """As torch's, of a list."""
    (target,), (given,) = outputs, inputs
    terms = _reduction(group, target, opts)
    return group.collective("reduce_scatter", terms, list(map(bytes_of, given)), given, outputs)


def reduce_scatter_single(group: NcclRuleGroup, output: Any, given: Any, opts: Any) -> Any:
    """As torch's, of one tensor."""
    return reduce_scatter(group, [output], [_parts(group, given)], opts)


def reduce_scatter_coalesced(
    group: NcclRuleGroup, outputs: Tensors, inputs: Tensors, opts: Any
) -> Any:
    """Several as one call."""
    pairs = list(zip(outputs, inputs, strict=True))
    return _together(
        group, pairs, lambda pair: reduce_scatter_single(group, pair[0], pair[1], opts)
    )


def all_to_all(group: NcclRuleGroup, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
    """As torch's, of lists."""
    expected = tuple(output.nbytes for output in outputs)
    terms = (_name(outputs[0]),)
    given = list(map(bytes_of, inputs))
    return group.collective("all_to_all", terms, given, inputs, outputs, expected)


def all_to_all_single(
    group: NcclRuleGroup, output: Any, given: Any, into: list[int], out_of: list[int], opts: Any
) -> Any:
    """As torch's, of rows of one tensor."""
    return all_to_all(group, _parts(group, output, into), _parts(group, given, out_of))


def barrier(group: NcclRuleGroup, opts: Any = None) -> Any:
    """Wait for all ranks; stops the host."""
    work = group.collective("barrier", (), [b""], (), [torch.zeros(0)] * group.size())
    work.wait()
    group.note_barrier()
    return work


def monitored_barrier(group: NcclRuleGroup, *_: Any, **__: Any) -> None:
    """Raise: NCCL has no such call."""
    raise NcclRuleError("monitored_barrier is gloo's; NCCL has none")


def _reduction(group: NcclRuleGroup, tensor: torch.Tensor, opts: Any) -> tuple[object, ...]:
    return (_name(tensor), group.op_name(opts.reduceOp), tensor.numel())


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _parts(group: NcclRuleGroup, tensor: Any, rows: Sequence[int] = ()) -> list[torch.Tensor]:
    """Split a tensor for the ranks; evenly, or by its first dim."""
    if rows:
        return list(tensor.split(list(rows)))
    return list(tensor.view(-1).chunk(group.size())) if tensor.numel() else [tensor] * group.size()


def _together(group: NcclRuleGroup, each: Sequence[Any], call: Callable[[Any], Any]) -> Any:
    device = torch.device("cpu")
    group._start_coalescing(device)
    for given in each:
        call(given)
    return group._end_coalescing(device)


METHODS: dict[str, Callable[..., Any]] = {
    "allreduce": all_reduce,
    "allreduce_coalesced": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "allgather": all_gather,
    "all_gather_single": all_gather_single,
    "_allgather_base": all_gather_single,
    "all_gather_single_coalesced": all_gather_coalesced,
    "allgather_into_tensor_coalesced": all_gather_coalesced,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "_reduce_scatter_base": reduce_scatter_single,
    "reduce_scatter_single_coalesced": reduce_scatter_coalesced,
    "reduce_scatter_tensor_coalesced": reduce_scatter_coalesced,
    "alltoall": all_to_all,
    "all_to_all_single": all_to_all_single,
    "alltoall_base": all_to_all_single,
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
}
