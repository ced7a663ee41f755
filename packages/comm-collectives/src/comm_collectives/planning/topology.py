"""The machine as the cost model sees it: nodes of ranks, and what a link costs at each level.

A preset is hardware with the software that drives it; where a figure comes from stands beside it.
For your own machine, measure and use `fit_cost_model`:

    topology = topology_preset("h100-nccl", nodes=8, gpus_per_node=8)
    mine = replace(topology, intra=Link(curve=fit_cost_model(samples)))
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial

from comm_collectives.errors import CommValueError
from comm_collectives.planning.cost_model import CostCurve
from comm_collectives.planning.wire import check_sizes
from comm_collectives.planning.wire_bytes import check_divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of links, which work in both directions at once.

    `curve` has the seconds for what the busiest endpoint sends, or receives if that is more;
    `message_s` is added for each message of a rank beyond its first.

    Raises:
        ValueError: `message_s` is negative or not finite.
    """

    curve: CostCurve
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.message_s < math.inf:
            raise CommValueError(f"message_s={self.message_s} must be finite seconds >= 0")

    def seconds(self, num_bytes: int, num_messages: int) -> float:
        """Return the time for these bytes in so many messages; 0 without messages."""
        if num_messages == 0:
            return 0.0
        return self.curve.seconds(num_bytes) + (num_messages - 1) * self.message_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of consecutive ranks; links inside (`intra`, per rank) and between (`inter`, per card).

    Attributes:
        nics_per_node: network cards of one node, shared evenly by its ranks; 0 means one per rank.
        streams_stages: whether a hierarchical movement forwards inside a node while it still
            receives from other nodes, so that it takes the longest of its stages, not their sum.

    Raises:
        ValueError: a number below 1, or cards that the ranks of a node cannot share evenly.
    """

    name: str
    nodes: int
    gpus_per_node: int
    intra: Link = field(repr=False)
    inter: Link = field(repr=False)
    nics_per_node: int = 0
    streams_stages: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "nodes", "gpus_per_node")
        if self.nics_per_node:
            check_divides("gpus_per_node", self.gpus_per_node, "nics_per_node", self.nics_per_node)

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_nic(self) -> int:
        """Ranks that share a network card."""
        return self.gpus_per_node // (self.nics_per_node or self.gpus_per_node)


def _line(alpha_s: float, bytes_per_s: float, message_s: float) -> Link:
    curve = CostCurve.line(alpha_s=alpha_s, bytes_per_s=bytes_per_s)
    return Link(curve=curve, message_s=message_s)


_of_one_rank = partial(Topology, nodes=1, gpus_per_node=1)
_ALL = (
    # What NCCL reaches of 450 GB/s nominal (nccl-tests issue 212), and of a ConnectX-7 at 400 Gb/s
    # (issue 267). Latencies: guesses.
    _of_one_rank(
        name="h100-nccl",
        intra=_line(10e-6, 370e9, 1e-6),
        inter=_line(25e-6, 48e9, 2e-6),
    ),
    # What DeepEP V1's normal kernels come to without a rank's own traffic: dispatch at EP 8 (153 of
    # nominal 160 GB/s) and EP 32 (58 GB/s). Source: DeepEP, docs/legacy.md. Latencies: guesses.
    _of_one_rank(
        name="h800-deepep",
        intra=_line(10e-6, 135e9, 0.0),
        inter=_line(20e-6, 44e9, 0.0),
        streams_stages=True,
    ),
    # Processes of one host over gloo's loopback TCP, roughly what a small two-core machine reaches
    # (fit your own); hosts joined by 10 Gb/s Ethernet, nominal, one card for all their processes.
    _of_one_rank(
        name="cpu-gloo",
        intra=_line(100e-6, 1e9, 20e-6),
        inter=_line(200e-6, 1.25e9, 20e-6),
        nics_per_node=1,
    ),
)
PRESETS = tuple(topology.name for topology in _ALL)


def topology_preset(name: str, *, nodes: int, gpus_per_node: int) -> Topology:
    """Return a preset with this many nodes and ranks per node.

    Raises:
        ValueError: there is no such preset, or a number is below 1.
    """
    for preset in _ALL:
        if preset.name == name:
            return replace(preset, nodes=nodes, gpus_per_node=gpus_per_node)
    raise CommValueError(f"no topology preset {name!r}; choose one of {', '.join(PRESETS)}")
