"""Bytes from each rank to each rank for given routing: what a plan predicts and a test counts.

counts = count_routing(topk_idx_WTK, num_experts=64, ranks_per_node=8)
wire_stages(counts, "dedup", "dispatch", row_format)[0].wire_bytes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from comm_collectives.errors import CommValueError
from comm_collectives.planning.wire import Movement, Route, RowFormat, message_bytes

TOWARDS_TOKENS = ("combine", "dispatch_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCounts:
    """How much goes from each rank where; W ranks, M nodes of `ranks_per_node` consecutive ranks.

    `choices_WW` counts choices of a rank's tokens for the experts of another, `tokens_WW` unique
    tokens among them, `tokens_WM` unique tokens of each rank with any choice in each node.
    """

    ranks_per_node: int
    choices_WW: tuple[tuple[int, ...], ...]
    tokens_WW: tuple[tuple[int, ...], ...]
    tokens_WM: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.choices_WW)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireStage:
    """The bytes from rank to rank of one exchange: "ranks", "between nodes" or "inside nodes"."""

    name: str
    bytes_WW: tuple[tuple[int, ...], ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all ranks that leave their rank."""
        kept = sum(row[rank] for rank, row in enumerate(self.bytes_WW))
        return sum(sum(row) for row in self.bytes_WW) - kept


def count_routing(
    topk_idx_WTK: Sequence[Sequence[Sequence[int]]], *, num_experts: int, ranks_per_node: int
) -> RoutingCounts:
    """Count a routing: for each rank, for each of its tokens, the chosen experts.

    Rank r holds experts r * E / W up to (r + 1) * E / W. A token may choose an expert twice, and -1
    is no expert.

    Raises:
        ValueError: the ranks divide neither the experts nor into nodes, or an expert is unknown.
    """
    num_ranks = len(topk_idx_WTK)
    check_divides("num_experts", num_experts, "ranks", num_ranks)
    check_divides("ranks", num_ranks, "ranks_per_node", ranks_per_node)
    num_local, num_nodes = num_experts // num_ranks, num_ranks // ranks_per_node
    choices_WW = [[0] * num_ranks for _ in range(num_ranks)]
    tokens_WW = [[0] * num_ranks for _ in range(num_ranks)]
    tokens_WM = [[0] * num_nodes for _ in range(num_ranks)]
    for source, topk_idx_TK in enumerate(topk_idx_WTK):
        for experts in topk_idx_TK:
            if any(not -1 <= e < num_experts for e in experts):
                raise CommValueError(
                    f"rank {source} has a token with choices {list(experts)}; every choice must "
                    f"be an expert in 0..{num_experts - 1}, or -1 for none"
                )
            ranks = [e // num_local for e in experts if e >= 0]
            for rank in ranks:
                choices_WW[source][rank] += 1
            for rank in set(ranks):
                tokens_WW[source][rank] += 1
            for node in {rank // ranks_per_node for rank in ranks}:
                tokens_WM[source][node] += 1
    return RoutingCounts(
        ranks_per_node=ranks_per_node,
        choices_WW=_frozen(choices_WW),
        tokens_WW=_frozen(tokens_WW),
        tokens_WM=_frozen(tokens_WM),
    )


def wire_stages(
    counts: RoutingCounts, route: Route, movement: Movement, row_format: RowFormat
) -> tuple[WireStage, ...]:
    """Return the exchanges of a movement in their order, each with its bytes per pair of ranks."""
    if route == "hierarchical":
        pieces = [
            ("between nodes", *_between_nodes(counts)),
            ("inside nodes", *_inside_nodes(counts)),
        ]
    else:
        pieces = [("ranks", counts.tokens_WW, counts.choices_WW)]
    stages = [
        WireStage(name=name, bytes_WW=_message_bytes(tokens, choices, route, movement, row_format))
        for name, tokens, choices in pieces
    ]
    if movement not in TOWARDS_TOKENS:
        return tuple(stages)
    return tuple(
        WireStage(name=stage.name, bytes_WW=tuple(zip(*stage.bytes_WW, strict=True)))
        for stage in reversed(stages)
    )


def check_divides(name: str, count: int, divisor_name: str, divisor: int) -> None:
    """Raise CommValueError if `count` things cannot be shared evenly."""
    if divisor < 1 or count < 1 or count % divisor:
        raise CommValueError(
            f"{name}={count} cannot be shared evenly by {divisor_name}={divisor}; "
            f"choose {name} as a multiple of {divisor_name}"
        )


_Matrix = Sequence[Sequence[int]]


def _between_nodes(counts: RoutingCounts) -> tuple[_Matrix, _Matrix]:
    """Tokens and choices from each rank to the rank of each node with its local index."""
    per_node, ranks = counts.ranks_per_node, range(counts.num_ranks)

    def choices(source: int, node: int) -> int:
        return sum(counts.choices_WW[source][node * per_node : (node + 1) * per_node])

    def forwarded(count: Callable[[int, int], int]) -> _Matrix:
        return [
            [0 if (source - r) % per_node else count(source, r // per_node) for r in ranks]
            for source in ranks
        ]

    return forwarded(lambda source, node: counts.tokens_WM[source][node]), forwarded(choices)


def _inside_nodes(counts: RoutingCounts) -> tuple[_Matrix, _Matrix]:
    """Tokens and choices from each forwarding rank to the ranks of its node, all sources summed."""
    size, per_node = counts.num_ranks, counts.ranks_per_node

    def summed(matrix: _Matrix) -> _Matrix:
        found = [[0] * size for _ in range(size)]
        for target in range(size):
            for source in range(size):
                forwarder = target // per_node * per_node + source % per_node
                found[forwarder][target] += matrix[source][target]
        return found

    return summed(counts.tokens_WW), summed(counts.choices_WW)


def _message_bytes(
    tokens_WW: _Matrix, choices_WW: _Matrix, route: Route, movement: Movement, row_format: RowFormat
) -> tuple[tuple[int, ...], ...]:
    @cache  # few pairs of counts are different where routing is even
    def num_bytes(tokens: int, choices: int) -> int:
        return message_bytes(route, movement, row_format, tokens=tokens, choices=choices)

    return tuple(
        tuple(map(num_bytes, tokens, choices))
        for tokens, choices in zip(tokens_WW, choices_WW, strict=True)
    )


def _frozen(matrix: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in matrix)
