"""What each collective of `torch.distributed` means in shared steps, and over gloo.

One function for each collective: it checks this rank's arguments, gives strided tensors contiguous
stand-ins, and returns an `Operation`. Whether shared steps or gloo do the work follows from what
all ranks compare in their first shared step, so they decide alike. Bytes move whatever their dtype.

    operation = all_reduce(place, [x], opts)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives.base import as_bytes, dense
from comm_collectives.errors import RefusedError
from comm_collectives.shm import moves, sums
from comm_collectives.shm.arguments import (
    Landings,
    Tensors,
    apart,
    check_even,
    check_same_dtype,
    even_targets,
    in_place,
    source_bytes,
    split_bytes,
    target_of,
)
from comm_collectives.shm.heads import Head
from comm_collectives.shm.moves import Span, span_of, spans_of
from comm_collectives.shm.queue import Operation
from comm_collectives.shm.reductions import find_reduction

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
        return by_gloo(place, sparse, lambda: place.gloo.allreduce([x], opts))
    name, reduction = find_reduction(opts.reduceOp, x.dtype)
    head = Head("all_reduce", x.dtype, name, x.nbytes)
    if reduction is None:
        return by_gloo(place, head, lambda: place.gloo.allreduce([x], opts))
    landings: Landings = []
    flat = in_place(x, landings)
    return Operation(
        name=_title(place, head),
        steps=lambda channel: sums.all_reduce_steps(channel, head, flat, reduction),
        over_gloo=lambda: place.gloo.allreduce([flat], opts),
        results=[x],
        landings=landings,
    )


def build_reduce(place: Place, tensors: Tensors, opts: Options) -> Operation:
    """Reduce to one rank; gloo does it."""
    x = tensors[0]
    name, _ = find_reduction(opts.reduceOp, x.dtype)
    head = Head("reduce", x.dtype, name, x.nbytes, opts.rootRank)
    landings: Landings = []
    flat = in_place(x, landings)
    operation = by_gloo(place, head, lambda: place.gloo.reduce([flat], opts))
    operation.results, operation.landings = [x], landings
    return operation


def build_broadcast(place: Place, tensors: Tensors, opts: Options) -> Operation:
    """Broadcast one tensor in place."""
    x, root = tensors[0], opts.rootRank
    head = Head("broadcast", x.dtype, "", x.nbytes, root)
    landings: Landings = []
    flat = source_bytes(x) if place.rank == root else as_bytes(target_of(x, landings))
    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.broadcast_steps(channel, head, span_of(flat), root),
        over_gloo=lambda: place.gloo.broadcast([flat], opts),
        results=[x],
        landings=landings,
    )


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
    targets = spans_of(flat, [source.nbytes] * place.size)
    sent = source_bytes(source)
    if targets[place.rank].address != sent.data_ptr():
        sent = apart(sent, flat)
    head = Head("all_gather", source.dtype, "", source.nbytes)
    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.all_gather_steps(channel, head, span_of(sent), targets),
        over_gloo=lambda: place.gloo._allgather_base(flat, sent, opts),
        results=[output],
        landings=landings,
    )


def build_all_gather(
    place: Place, outputs: Sequence[Tensors], sources: Tensors, opts: Options
) -> Operation:
    """Gather equal tensors into a list of them."""
    source = sources[0]
    landings: Landings = []
    targets = even_targets(place.size, outputs[0], source, landings)
    sent = apart(source_bytes(source), *targets)
    head = Head("all_gather", source.dtype, "", source.nbytes)
    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.all_gather_steps(channel, head, span_of(sent), _spans(targets)),
        over_gloo=lambda: place.gloo.allgather([targets], [sent], opts),
        results=list(outputs[0]),
        landings=landings,
    )


def build_gather(
    place: Place, outputs: Sequence[Tensors], sources: Tensors, opts: Options
) -> Operation:
    """Gather equal tensors into a list of them on one rank."""
    source, root = sources[0], opts.rootRank
    landings: Landings = []
    wanted = outputs[0] if place.rank == root and outputs else []
    targets = even_targets(place.size, wanted, source, landings) if place.rank == root else []
    sent = apart(source_bytes(source), *targets)
    head = Head("gather", source.dtype, "", source.nbytes, root)
    return Operation(
        name=_title(place, head),
        steps=lambda c: moves.gather_steps(c, head, span_of(sent), _spans(targets), root),
        over_gloo=lambda: place.gloo.gather([targets] if targets else [], [sent], opts),
        results=list(wanted),
        landings=landings,
    )


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
    return Operation(
        name=_title(place, head),
        steps=lambda c: moves.scatter_steps(c, head, _spans(sent), span_of(target), root),
        over_gloo=lambda: place.gloo.scatter([target], [sent] if sent else [], opts),
        results=[output],
        landings=landings,
    )


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
    name, reduction = find_reduction(opts.reduceOp, output.dtype)
    head = Head("reduce_scatter", output.dtype, name, total)

    def over_gloo() -> Any:
        return place.gloo.reduce_scatter([target], [list(parts)], opts)

    if reduction is None:
        operation = by_gloo(place, head, over_gloo)
        operation.results, operation.landings = [output], landings
        return operation
    return Operation(
        name=_title(place, head),
        steps=lambda channel: sums.reduce_scatter_steps(channel, head, parts, target, reduction),
        over_gloo=over_gloo,
        results=[output],
        landings=landings,
    )


def build_all_to_all_single(
    place: Place,
    output: torch.Tensor,
    source: torch.Tensor,
    splits: tuple[Sequence[int], Sequence[int]],
    opts: Options,
) -> Operation:
    """Exchange rows; `splits` are those of the output and of the input, empty if even."""
    check_same_dtype(output, source)
    received = split_bytes(place.size, output, splits[0], "output")
    sent = split_bytes(place.size, source, splits[1], "input")
    landings: Landings = []
    flat = as_bytes(target_of(output, landings))
    data = apart(source_bytes(source), flat)
    head = Head("all_to_all", source.dtype)
    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.swap(
            channel, head, spans_of(data, sent), spans_of(flat, received)
        ),
        over_gloo=lambda: place.gloo.alltoall_base(flat, data, received, sent, opts),
        results=[output],
        landings=landings,
    )


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
    targets = [as_bytes(target_of(output, landings)) for output in outputs]
    sent = [apart(source_bytes(source), *targets) for source in sources]
    head = Head("all_to_all", sources[0].dtype)

    def over_gloo() -> Any:
        sizes = [target.nbytes for target in targets]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        # Before the others, whose stand-ins these may be.
        landings[:0] = zip(targets, flat.split(sizes), strict=True)
        return place.gloo.alltoall_base(
            flat, torch.cat(sent), sizes, [part.nbytes for part in sent], opts
        )

    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.swap(channel, head, _spans(sent), _spans(targets)),
        over_gloo=over_gloo,
        results=list(outputs),
        landings=landings,
    )


def build_barrier(place: Place, opts: Options) -> Operation:
    """Meet."""
    head = Head("barrier")
    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.meet(channel, head),
        over_gloo=lambda: place.gloo.barrier(opts),
    )


def by_gloo(place: Place, head: Head, start: Callable[[], dist.Work]) -> Operation:
    """Have gloo do it, once all ranks have shown that they make the same call."""
    return Operation(
        name=_title(place, head),
        steps=lambda channel: moves.meet(channel, head),
        over_gloo=start,
        is_gloo=True,
    )


def refused(error: RefusedError) -> Operation:
    """Raise `error` here, and let the other ranks know."""

    def complain() -> dist.Work:
        raise error

    return Operation(
        name="refused", steps=lambda channel: moves.refuse(channel, error), over_gloo=complain
    )


def _title(place: Place, head: Head) -> str:
    return f"{head.operation} of group {place.ranks}"


def _spans(parts: Sequence[torch.Tensor]) -> list[Span]:
    return [span_of(part) for part in parts]
