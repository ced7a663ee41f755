"""Several exchanges instead of one, where that is cheaper: the layouts on the way.

A direct exchange moves the fewest bytes where nothing is partial. Two things may be better: a
reduction whose result many ranks want is first scattered, each addend sent once; and with a
topology, layouts that change one axis after the other need fewer messages.

    stages(source, target, topology, 1)     # [source, target], or with layouts between them
"""

from __future__ import annotations

from itertools import combinations
from math import inf

from torch.distributed.tensor import Partial, Replicate

from mesh_spmd.layout import FlatSpec, Spec, TensorSpec
from mesh_spmd.reshard.messages import receives_of, sends_of
from mesh_spmd.reshard.moves import Link
from mesh_spmd.reshard.steps import Step, make_step
from mesh_spmd.reshard.topology import Topology

SAMPLED_RANKS = 16  # whose messages are counted; the bytes of all ranks are known


def stages(
    source: TensorSpec, target: TensorSpec, topology: Topology | None, num_tensors: int
) -> list[TensorSpec]:
    """Return the layouts on the cheapest way found, source first and target last.

    Args:
        source: the tensor before.
        target: the tensor after.
        topology: prices messages and bytes; without it the busiest rank's bytes do.
        num_tensors: how many tensors share each message's latency.
    """
    between = _scattered(source, target)
    if topology is not None and not target.partials:
        between += _hybrids(source, target)
    if not between:
        return [source, target]
    nodes = [source, *dict.fromkeys(b for b in between if b not in (source, target)), target]
    last = len(nodes) - 1
    cost, best = [0.0] + [inf] * last, [[0]] + [[0]] * last
    for here in range(1, last + 1):
        for before in range(here):
            if cost[before] == inf or not _allowed(nodes[before], nodes[here]):
                continue
            step = make_step([nodes[before]], [nodes[here]], [Link(source=0, target=0)])
            price = cost[before] + _price(step, topology, num_tensors)
            if price < cost[here]:
                cost[here], best[here] = price, [*best[before], here]
    return [nodes[i] for i in best[last]]


def _allowed(source: TensorSpec, target: TensorSpec) -> bool:
    """What is partial may be reduced on the way, never made partial again."""
    return set(target.partials.items()) <= set(source.partials.items())


def _scattered(source: TensorSpec, target: TensorSpec) -> list[TensorSpec]:
    """The values cut evenly over the ranks that hold addends, or over those that want copies."""
    found = []
    if source.partials and not isinstance(source.spec, FlatSpec) and not target.partials:
        found.append(_cut_elements(source))
    if source.partials and not isinstance(target.spec, FlatSpec) and not target.partials:
        found.append(_cut_elements(target))
    return [cut for cut in found if cut is not None]


def _cut_elements(tensor: TensorSpec) -> TensorSpec | None:
    spec = tensor.boxes
    pairs = dict(zip(spec.mesh.axis_names, spec.placements, strict=True))
    whole = {a: Replicate() if isinstance(p, Partial) else p for a, p in pairs.items()}
    free = tuple(axis for axis, p in whole.items() if isinstance(p, Replicate))
    if not free:
        return None
    boxes = Spec.from_axes(spec.mesh, whole, order=spec.order, sizes=dict(spec.sizes))
    return TensorSpec(tensor.shape, tensor.dtype, FlatSpec(boxes, free))


def _hybrids(source: TensorSpec, target: TensorSpec) -> list[TensorSpec]:
    """Layouts that have changed some axes already, those of the fewest axes first."""
    if source.mesh != target.mesh or source.boxes is not source.spec:
        found = [_cut_elements(target)] if target.boxes is target.spec else []
        return [cut for cut in found if cut is not None]
    if target.boxes is not target.spec or source.boxes.sizes or target.boxes.sizes:
        return []
    before, after = source.boxes.placements, target.boxes.placements
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    order = target.boxes.order
    return [
        TensorSpec(
            source.shape,
            source.dtype,
            Spec(
                source.mesh,
                tuple(after[i] if i in some else p for i, p in enumerate(before)),
                order,
            ),
        )
        for count in range(1, len(changed))
        for some in combinations(changed, count)
    ]


def _price(step: Step, topology: Topology | None, num_tensors: int) -> float:
    """What the busiest rank of a step pays: bytes, or seconds where there is a topology."""
    if topology is None:
        return float(max(*step.sent, *step.received))
    stride = max(1, len(step.ranks) // SAMPLED_RANKS)
    return max(_seconds(step, rank, topology, num_tensors) for rank in step.ranks[::stride])


def _seconds(step: Step, rank: int, topology: Topology, num_tensors: int) -> float:
    worst = 0.0
    for side in (sends_of, receives_of):
        peers: dict[int, int] = {}
        for number, (move, shares) in enumerate(zip(step.moves, step.shares, strict=True)):
            for piece in side(move, number, shares, rank):
                size = (piece.end - piece.begin) * move.dtype.itemsize
                peers[piece.peer] = peers.get(piece.peer, 0) + size
        near = [size for peer, size in peers.items() if topology.near(rank, peer)]
        far = [size for peer, size in peers.items() if not topology.near(rank, peer)]
        seconds = topology.seconds(
            messages=(len(near), len(far)),
            num_bytes=(sum(near) * num_tensors, sum(far) * num_tensors),
        )
        worst = max(worst, seconds)
    return worst
