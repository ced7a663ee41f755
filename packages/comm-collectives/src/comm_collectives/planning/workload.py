"""What a MoE layer asks of the wires: its sizes, and what uniform routing comes to.

workload = Workload(num_experts=256, topk=8, hidden_size=7168, tokens_per_rank=4096)
share_of_tokens(workload, nodes=8, experts_there=32) * 8    # 5.29 of 8 nodes get a token's row
"""

from dataclasses import dataclass
from math import comb
from typing import Literal

from comm_collectives.errors import CommValueError
from comm_collectives.planning.topology import Topology
from comm_collectives.planning.wire import RowFormat, check_sizes
from comm_collectives.planning.wire_bytes import check_divides

Payload = Literal["full", "float8_e4m3"]  # int8 has the same bytes
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One MoE layer: its sizes, and the dtypes of rows and routing weights.

    `nodes_per_token` limits in how many nodes the choices of one token may lie; 0 is no limit.

    Raises:
        ValueError: sizes below 1, more choices than experts, or an unknown dtype.
        TypeError: a size is no integer.
    """

    num_experts: int
    topk: int
    hidden_size: int
    tokens_per_rank: int
    dtype: str = "bfloat16"
    weight_dtype: str = "float32"
    nodes_per_token: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "topk", "hidden_size", "tokens_per_rank")
        if self.topk > self.num_experts:
            raise CommValueError(
                f"topk={self.topk} but num_experts={self.num_experts}; a token cannot choose more "
                "experts than there are"
            )
        check_sizes(self, "nodes_per_token", least=0)
        for name in ("dtype", "weight_dtype"):
            if getattr(self, name) not in ITEMSIZES:
                raise CommValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of "
                    f"{', '.join(ITEMSIZES)}"
                )

    def row_format(self, payload: Payload) -> RowFormat:
        """Return how a row is dispatched with this payload."""
        return RowFormat(
            hidden_size=self.hidden_size,
            itemsize=ITEMSIZES[self.dtype],
            weight_itemsize=ITEMSIZES[self.weight_dtype],
            block_scaled=payload != "full",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCounts:
    """What every rank has for every other if each token chooses different experts, all alike.

    Expected values: `choices` of a rank's tokens for the experts of one rank, unique tokens among
    them (`to_rank`), and unique tokens with any choice in one node (`to_node`).
    """

    choices: float
    to_rank: float
    to_node: float


def uniform_counts(workload: Workload, topology: Topology) -> UniformCounts:
    """Return the expected counts of uniform routing, for nodes and then for experts there.

    Raises:
        ValueError: the ranks do not divide the experts, or the allowed nodes have too few.
    """
    ranks, tokens = topology.num_ranks, workload.tokens_per_rank
    check_divides("num_experts", workload.num_experts, "ranks", ranks)
    per_rank, per_node = workload.num_experts // ranks, workload.num_experts // topology.nodes
    return UniformCounts(
        choices=tokens * workload.topk / ranks,
        to_rank=tokens * share_of_tokens(workload, topology.nodes, per_rank),
        to_node=tokens * share_of_tokens(workload, topology.nodes, per_node),
    )


def share_of_tokens(workload: Workload, nodes: int, experts_there: int) -> float:
    """Fraction of tokens with any choice among `experts_there` experts of one node."""
    allowed = min(workload.nodes_per_token or nodes, nodes)
    reachable = workload.num_experts // nodes * allowed
    if workload.topk > reachable:
        raise CommValueError(
            f"topk={workload.topk} but nodes_per_token={allowed} nodes hold {reachable} experts; "
            "allow more nodes"
        )
    missed = comb(reachable - experts_there, workload.topk) / comb(reachable, workload.topk)
    return allowed / nodes * (1 - missed)
