"""Plans: from one layout to another, as data that is equal on every rank and needs no device.

Invariant: where nothing is partial and no topology is given, the busiest receiver gets exactly what
it lacks, and the busiest sender sends as little as the replicas allow (of lists of several sizes of
elements, less than one of the widest above that; see `senders`).

    plan = plan_reshard(TensorSpec((64, 512), torch.bfloat16, over_8), TensorSpec(..., over_16))
    plan.busiest_bytes      # the most that a rank receives, and the most that one sends
    plan.hash               # equal on every rank, in every process
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard.messages import Piece, copy_of, receives_of, sends_of
from mesh_spmd.reshard.moves import Link
from mesh_spmd.reshard.staged import stages
from mesh_spmd.reshard.steps import BUFFER_BYTES, Step, make_step
from mesh_spmd.reshard.topology import Topology
from mesh_spmd.reshard.turns import buffer_bytes_of, local_bytes, result_bytes


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """What moves between ranks, in steps. Plain data; `execute` carries it out.

    Attributes:
        steps: exchanges, one after the other; one, unless something is partial or a topology makes
            several cheaper.
        single: whether it was made for one tensor and not for a list.
    """

    steps: tuple[Step, ...]
    single: bool

    def __post_init__(self) -> None:
        check_kind(self.steps, tuple, "the steps of a Plan must be a tuple; use plan_reshard")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something, ascending."""
        return tuple(sorted({rank for step in self.steps for rank in step.ranks}))

    @property
    def sources(self) -> tuple[TensorSpec, ...]:
        """The tensors before."""
        return self.steps[0].sources

    @property
    def targets(self) -> tuple[TensorSpec, ...]:
        """The tensors after."""
        return self.steps[-1].targets

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank sends to others, in all steps."""
        return self._by_rank("sent")

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes that each rank receives from others, in all steps."""
        return self._by_rank("received")

    @property
    def busiest_bytes(self) -> tuple[int, int]:
        """The most bytes that a rank receives, and the most that a rank sends."""
        return (
            max(self.received_bytes.values(), default=0),
            max(self.sent_bytes.values(), default=0),
        )

    @property
    def block_bytes(self) -> dict[int, int]:
        """The bytes of each rank's parts of the source and target tensors together."""
        tensors = (*self.sources, *self.targets)
        return {rank: sum(local_bytes(t, rank) for t in tensors) for rank in self.ranks}

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The most bytes that `execute` allocates at one time, by rank, beside the source tensors.

        They are the target tensors and, where there are several steps, those between; and buffers,
        at most as many bytes as `buffer_bytes` of `plan_reshard` says, or the source and target
        blocks if these are less, and an element for each message.
        """
        return {rank: self._peak(rank) for rank in self.ranks}

    def _peak(self, rank: int) -> int:
        peak = before = 0
        for number, step in enumerate(self.steps):
            peak = max(peak, before + result_bytes(step, rank, later=number > 0))
            before = sum(local_bytes(target, rank) for target in step.targets)
        return peak + buffer_bytes_of(self.steps, rank)

    @property
    def hash(self) -> str:
        """A hash of the whole plan: equal on ranks, in processes, that plan the same."""
        return hashlib.sha256("".join(s.digest() for s in self.steps).encode()).hexdigest()

    def sends(self, rank: int, step: int = 0) -> list[Piece]:
        """Return the messages that `rank` sends in a step, in the order of moves."""
        found = self.steps[step]
        return [
            piece
            for number, (move, shares) in enumerate(zip(found.moves, found.shares, strict=True))
            for piece in sends_of(move, number, shares, rank)
        ]

    def receives(self, rank: int, step: int = 0) -> list[Piece]:
        """Return the messages that `rank` receives in a step, in the order of moves."""
        found = self.steps[step]
        return [
            piece
            for number, (move, shares) in enumerate(zip(found.moves, found.shares, strict=True))
            for piece in receives_of(move, number, shares, rank)
        ]

    def copies(self, rank: int, step: int = 0) -> list[Piece]:
        """Return what `rank` copies within itself in a step."""
        moves = self.steps[step].moves
        return [p for number, move in enumerate(moves) for p in copy_of(move, number, rank)]

    def _by_rank(self, what: str) -> dict[int, int]:
        total = dict.fromkeys(self.ranks, 0)
        for step in self.steps:
            column: Sequence[int] = getattr(step, what)
            for rank, count in zip(step.ranks, column, strict=True):
                total[rank] += count
        return total


def plan_reshard(
    source: TensorSpec | Sequence[TensorSpec],
    target: TensorSpec | Sequence[TensorSpec],
    topology: Topology | None = None,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> Plan:
    """Return how tensors get from one layout to another. Not collective; no device is needed.

    The meshes of both sides may be the same, overlap or be disjoint. What is partial in the source
    and not in the target is reduced as it is scattered.

    Args:
        source: the tensor before, or a list of tensors, which are moved at once.
        target: the tensor after, or as many; of the same shapes and dtypes.
        topology: makes the plan choose between one direct exchange and several with fewer
            messages, by what they cost; without it, the busiest rank's bytes decide.
        buffer_bytes: what the buffers of a rank may take, beside source and target tensors; the
            exchange is cut into so many rounds. They never take more than both blocks, or 1 MiB
            where these are smaller.

    Raises:
        MeshTypeError: something else than TensorSpec is given, or a reduction does not exist for a
            dtype.
        MeshValueError: the numbers of tensors differ, or a shape or a dtype does; or `buffer_bytes`
            is below 1.
    """
    check_kind(buffer_bytes, int, "buffer_bytes must be a number of bytes")
    if buffer_bytes < 1:
        raise MeshValueError(f"buffer_bytes is {buffer_bytes}; give a number of bytes above zero")
    single = isinstance(source, TensorSpec)
    before = [source] if isinstance(source, TensorSpec) else checked_tensors(source, "source")
    after = [target] if isinstance(target, TensorSpec) else checked_tensors(target, "target")
    if topology is not None:
        check_kind(topology, Topology, "topology must be a Topology")
    if len(before) != len(after) or isinstance(target, TensorSpec) != single:
        raise MeshValueError(
            f"{len(before)} source and {len(after)} target tensors were given; give one for one, "
            "or two lists of the same length"
        )
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise MeshValueError(
                f"tensor {number} is {a.dtype} of {a.shape} in the source and {b.dtype} of "
                f"{b.shape} in the target; resharding keeps shape and dtype"
            )
    columns = _columns(before, after, topology)
    links = [Link(source=i, target=i) for i in range(len(before))]
    steps = [make_step(a, b, links, buffer_bytes) for a, b in pairwise(columns)]
    return Plan(steps=tuple(steps), single=single)


def _columns(
    before: list[TensorSpec], after: list[TensorSpec], topology: Topology | None
) -> list[Sequence[TensorSpec]]:
    """The layouts of all tensors before the first step, after it, and so on to the last one."""
    if topology is None and not any(tensor.partials for tensor in before):
        return [before, after]
    known: dict[tuple[TensorSpec, TensorSpec], list[TensorSpec]] = {}
    paths = []
    for a, b in zip(before, after, strict=True):
        if (a, b) not in known:
            known[a, b] = stages(a, b, topology, len(before))
        paths.append(known[a, b])
    length = max(map(len, paths), default=2)
    # Shorter ways are done in the first step, and rest.
    paths = [path + path[-1:] * (length - len(path)) for path in paths]
    return list(zip(*paths, strict=True)) or [(), ()]


def checked_tensors(tensors: Sequence[TensorSpec], what: str) -> list[TensorSpec]:
    """Return a list of TensorSpec.

    Raises:
        MeshTypeError: it is none.
    """
    if isinstance(tensors, str) or not isinstance(tensors, Sequence):
        raise MeshTypeError(f"{what} must be a TensorSpec or a list of them, got {tensors!r}")
    for tensor in tensors:
        check_kind(tensor, TensorSpec, f"{what} must be a TensorSpec or a list of them")
    return list(tensors)
