"""What each collective of `torch.distributed` means over frames; gloo has what has no place here.

One function for each collective: it checks this rank's arguments, gives strided tensors contiguous
stand-ins, and returns an `Operation`. Whether gloo does the work follows from what all ranks
compare first, so they decide alike. Bytes move whatever their dtype.

    operation = build_all_reduce(place, [x], opts)
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives.base import as_bytes, dense
from comm_collectives.collectives import check_op
from comm_collectives.collectives.drop_in import both_splits, op_name
from comm_collectives.errors import MismatchError, RefusedError, RefusedTypeError
from comm_collectives.shm import moves, sums
from comm_collectives.shm.arguments import (
    Landings,
    Tensors,
    apart,
    check_even,
    check_same_dtype,
    in_place,
    source_bytes,
    target_bytes,
    target_of,
)
from comm_collectives.shm.calls import REFUSED, Call, Head, Operation

# Torch's stubs do not know the collectives of `ProcessGroupGloo`.
Gloo = Any
# Each collective has its own type of options: `timeout`, `asyncOp`, `reduceOp`, `rootRank`.
Options = Any


@final
@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in its group: its number inside, all global numbers, and gloo."""

    rank: int
    ranks: tuple[int, ...]
    gloo: Gloo

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def build_all_reduce(place: Place, tensors: Tensors, opts: Options) -> Operation:
    """Reduce one tensor in place."""
    x = tensors[0]
    if x.layout != torch.strided:
        sparse = Head("all_reduce of sparse tensors")
        return by_gloo(sparse, lambda: place.gloo.allreduce([x], opts), [x])
    op = checked_op(opts, x.dtype)
    landings: Landings = []
    flat = in_place(x, landings)
    head = Head("all_reduce", x.dtype, op, x.nbytes)
    return Operation(head, lambda call: sums.reduce_to_all(call, flat, op), [x], landings)


def build_reduce(place: Place, tensors: Tensors, opts: Options) -> Operation:
    """Reduce to one rank."""
    x, root = tensors[0], opts.rootRank
    op = checked_op(opts, x.dtype)
    landings: Landings = []
    flat = in_place(x, landings)
    head = Head("reduce", x.dtype, op, x.nbytes, root)
    return Operation(head, lambda call: sums.reduce(call, flat, root, op), [x], landings)


def build_broadcast(place: Place, tensors: Tensors, opts: Options) -> Operation:
    """Broadcast one tensor in place."""
    x, root = tensors[0], opts.rootRank
    head = Head("broadcast", x.dtype, "", x.nbytes, root)
    landings: Landings = []
    flat = source_bytes(x) if place.rank == root else as_bytes(target_of(x, landings))
    return Operation(head, lambda call: moves.send_to_all(call, flat, root), [x], landings)


def build_all_gather_single(
    place: Place, output: torch.Tensor, source: torch.Tensor, opts: Options
) -> Operation:
    """Gather equal tensors into one."""
    check_same_dtype(output, source)
    if output.numel() != source.numel() * place.size:
        raise RefusedError(
            f"all_gather of {source.numel()} elements on {place.size} ranks needs an output of "
            f"{source.numel() * place.size}, not {output.numel()}"
        )
    landings: Landings = []
    flat = as_bytes(target_of(output, landings))
    targets = flat.split(source.nbytes) if flat.numel() else [flat] * place.size
    return _all_gather(place, targets, source, [output], landings)


def build_all_gather(
    place: Place, outputs: Sequence[Tensors], sources: Tensors, opts: Options
) -> Operation:
    """Gather equal tensors into a list of them."""
    check_even(place.size, outputs[0], sources[0])
    landings: Landings = []
    targets = target_bytes(outputs[0], landings)
    return _all_gather(place, targets, sources[0], outputs[0], landings)


def _all_gather(
    place: Place, targets: Tensors, source: torch.Tensor, outputs: Tensors, landings: Landings
) -> Operation:
    sent = source_bytes(source)
    if targets[place.rank].data_ptr() != sent.data_ptr():
        sent = apart(sent, *targets)
    head = Head("all_gather", source.dtype, "", source.nbytes)
    return Operation(
        head, lambda call: moves.collect_for_all(call, sent, targets), outputs, landings
    )


def build_gather(
    place: Place, outputs: Sequence[Tensors], sources: Tensors, opts: Options
) -> Operation:
    """Gather equal tensors into a list of them on one rank."""
    source, root = sources[0], opts.rootRank
    landings: Landings = []
    wanted = outputs[0] if place.rank == root and outputs else []
    if place.rank == root:
        check_even(place.size, wanted, source)
    targets = target_bytes(wanted, landings)
    sent = apart(source_bytes(source), *targets)
    head = Head("gather", source.dtype, "", source.nbytes, root)
    return Operation(head, lambda call: moves.collect(call, sent, targets, root), wanted, landings)


def build_scatter(
    place: Place, outputs: Tensors, sources: Sequence[Tensors], opts: Options
) -> Operation:
    """Scatter a list of equal tensors of one rank."""
    output, root = outputs[0], opts.rootRank
    landings: Landings = []
    target = as_bytes(target_of(output, landings))
    given: Tensors = sources[0] if place.rank == root and sources else []
    if place.rank == root:
        check_even(place.size, given, output)
    sent = [apart(source_bytes(source), target) for source in given]
    head = Head("scatter", output.dtype, "", output.nbytes, root)
    return Operation(head, lambda call: moves.spread(call, sent, target, root), [output], landings)


def build_reduce_scatter_single(
    place: Place, output: torch.Tensor, source: torch.Tensor, opts: Options
) -> Operation:
    """Reduce one tensor, of which each rank gets its part."""
    if source.numel() != output.numel() * place.size:
        raise RefusedError(
            f"reduce_scatter to {output.numel()} elements on {place.size} ranks needs an input of "
            f"{output.numel() * place.size}, not {source.numel()}"
        )
    check_same_dtype(output, source)
    landings: Landings = []
    target = target_of(output, landings)
    flat = apart(dense(source).view(-1), target)
    num = output.numel()
    parts = [flat[at : at + num] for at in range(0, num * place.size, num or 1)]
    return _reduce_scatter(place, output, parts or [flat] * place.size, (target, landings), opts)


def build_reduce_scatter(
    place: Place, outputs: Tensors, sources: Sequence[Tensors], opts: Options
) -> Operation:
    """Reduce a list of tensors, of which each rank gets one."""
    output, given = outputs[0], sources[0]
    if len(given) != place.size or given[place.rank].numel() != output.numel():
        raise RefusedError(
            f"reduce_scatter on {place.size} ranks needs as many tensors, not {len(given)}, and "
            f"an output of the size of this rank's, not of {output.numel()} elements"
        )
    for tensor in given:
        check_same_dtype(output, tensor)
    landings: Landings = []
    target = target_of(output, landings)
    parts = [apart(dense(part).view(-1), target) for part in given]
    return _reduce_scatter(place, output, parts, (target, landings), opts)


def _reduce_scatter(
    place: Place,
    output: torch.Tensor,
    parts: Tensors,
    landing: tuple[torch.Tensor, Landings],
    opts: Options,
) -> Operation:
    target, landings = landing
    total = sum(part.nbytes for part in parts)
    op = checked_op(opts, output.dtype)
    head = Head("reduce_scatter", output.dtype, op, total)
    return Operation(
        head, lambda call: sums.reduce_parts(call, parts, target, op), [output], landings
    )


def build_all_to_all_single(
    place: Place,
    output: torch.Tensor,
    source: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Options,
) -> Operation:
    """Exchange rows; splits are empty if even."""
    check_same_dtype(output, source)
    sent, received = both_splits(output, source, output_splits, input_splits, place.size)
    landings: Landings = []
    flat = as_bytes(target_of(output, landings))
    data = apart(source_bytes(source), flat)
    sources, targets = _cut(data, sent), _cut(flat, received)
    head = Head("all_to_all", source.dtype)
    return Operation(head, lambda call: call.swap(sources, targets), [output], landings)


def _cut(flat: torch.Tensor, rows: Sequence[int]) -> Tensors:
    row_bytes = flat.numel() // (sum(rows) or 1)
    return flat.split_with_sizes([n * row_bytes for n in rows])


def build_all_to_all(place: Place, outputs: Tensors, sources: Tensors, opts: Options) -> Operation:
    """Exchange one tensor with each rank; the sizes may differ."""
    if len(outputs) != place.size or len(sources) != place.size:
        raise RefusedError(
            f"all_to_all on {place.size} ranks needs as many tensors in each list, "
            f"not {len(outputs)} outputs and {len(sources)} inputs"
        )
    for tensor in (*outputs, *sources):
        check_same_dtype(tensor, sources[0])
    landings: Landings = []
    targets = target_bytes(outputs, landings)
    sent = [apart(source_bytes(source), *targets) for source in sources]
    head = Head("all_to_all", sources[0].dtype)
    return Operation(head, lambda call: call.swap(sent, targets), outputs, landings)


def build_barrier(place: Place, opts: Options) -> Operation:
    """Meet."""
    return Operation(Head("barrier"), lambda call: call.exchange(None, None))


def checked_op(opts: Options, dtype: torch.dtype) -> str:
    """Return the name of the reduction.

    Raises:
        CommValueError, CommTypeError: it is not defined for the dtype.
    """
    op = op_name(opts.reduceOp)
    check_op(dtype, op)
    return op


def by_gloo(head: Head, start: Callable[[], dist.Work], results: Sequence[Any]) -> Operation:
    """Have gloo do it, once all ranks have shown that they make the same call."""

    def run(call: Call) -> None:
        call.exchange(None, None)
        start().wait()

    return Operation(head, run, results)


def left_to_gloo(
    name: str, start: Callable[..., dist.Work], arguments: Sequence[Any], opts: Options
) -> Operation:
    """Leave a collective of several tensors, of which the last list is sent, to gloo."""
    sent = arguments[-1]
    head = Head(name, sent[0].dtype, "", sum(tensor.nbytes for tensor in sent))
    return by_gloo(head, lambda: start(*arguments, opts), arguments[0])


def refused(error: ValueError | TypeError) -> Operation:
    """Raise an error here, and let the other ranks know."""
    kind = RefusedTypeError if isinstance(error, TypeError) else RefusedError

    def run(call: Call) -> None:
        with suppress(MismatchError):
            call.exchange(None, None)
        raise kind(str(error)) from error

    return Operation(Head(REFUSED), run)
