"""Choose how MoE rows travel: flat, deduplicated or hierarchical, in full or block-scaled.

Bytes come from `wire`, which the executor asks too, so for a given routing they are exact. Uniform
routing is planned for one rank, since all are alike, with counts rounded to whole rows. Times
are the topology's curves at the busiest endpoint of each level: links alone, no work on the ranks.

    topology = topology_preset("h100-nccl", nodes=8, gpus_per_node=8)
    workload = Workload(num_experts=256, topk=8, hidden_size=7168, tokens_per_rank=4096)
    plan_dispatch(workload, topology).choice  # "hierarchical", "float8_e4m3"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from comm_collectives.errors import CommValueError
from comm_collectives.planning.topology import Topology
from comm_collectives.planning.wire import (
    MOVEMENTS,
    ROUTES,
    Movement,
    Route,
    RowFormat,
    message_bytes,
)
from comm_collectives.planning.wire_bytes import (
    TOWARDS_TOKENS,
    RoutingCounts,
    WireStage,
    check_divides,
    count_routing,
    wire_stages,
)
from comm_collectives.planning.workload import Payload, UniformCounts, Workload, uniform_counts

_FORWARD: tuple[Movement, ...] = ("dispatch", "combine")
_WORTH = 0.02  # what a less simple variant must at least save


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """One exchange: what its busiest rank or network card sends or receives, and its time.

    `messages` count what a rank sends; what it keeps for itself is not counted.
    """

    name: str
    intra_bytes: int
    inter_bytes: int
    nic_bytes: int
    intra_messages: int
    inter_messages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MovementPlan:
    """One movement: its exchanges in order and its time, overlaps included."""

    movement: Movement
    stages: tuple[StageLoad, ...]
    seconds: float

    def total(self, figure: str) -> int:
        """Sum an integer figure of `StageLoad` over the stages."""
        return sum(getattr(stage, figure) for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantPlan:
    """One way to move the rows. `copies_per_token`: rows a token becomes in the first exchange."""

    route: Route
    payload: Payload
    copies_per_token: float
    movements: tuple[MovementPlan, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of dispatch and combine."""
        return sum(m.seconds for m in self.movements if m.movement in _FORWARD)

    @property
    def backward_s(self) -> float:
        """Seconds of the backwards of both."""
        return sum(m.seconds for m in self.movements if m.movement not in _FORWARD)

    def movement(self, name: Movement) -> MovementPlan:
        """Return one movement by name."""
        return self.movements[MOVEMENTS.index(name)]

    def __str__(self) -> str:
        return f"{self.route} {self.payload}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """All variants, the chosen one, and why."""

    workload: Workload
    topology: Topology
    variants: tuple[VariantPlan, ...]
    choice: VariantPlan
    reason: str

    def variant(self, route: Route, payload: Payload) -> VariantPlan:
        """Return one variant.

        Raises:
            ValueError: the plan did not consider it.
        """
        for variant in self.variants:
            if (variant.route, variant.payload) == (route, payload):
                return variant
        raise CommValueError(
            f"the plan has no variant {route} {payload}; it has "
            f"{', '.join(str(variant) for variant in self.variants)}"
        )


def plan_dispatch(
    workload: Workload,
    topology: Topology,
    *,
    counts: RoutingCounts | None = None,
    payloads: Sequence[Payload] = get_args(Payload),
) -> DispatchPlan:
    """Predict bytes and seconds of every variant and choose the fastest dispatch + combine.

    A simpler variant (flat before dedup before hierarchical, full before float8_e4m3) is chosen
    where nothing else is at least 2 % faster. Hierarchical is left out where it is the same as
    dedup: on one node, or with one rank per node.

    Args:
        workload: of one rank; all ranks have the same number of tokens.
        topology: where the group runs.
        counts: of a real routing (`count_routing`); None plans for uniform routing.
        payloads: which are allowed; float8_e4m3 rounds the dispatched rows, so leave it out to be
            exact.

    Raises:
        ValueError: the ranks do not divide the experts, the choices do not fit into the allowed
            nodes, the counts are those of other ranks, or `payloads` has none or an unknown one.
    """
    check_divides("num_experts", workload.num_experts, "ranks", topology.num_ranks)
    allowed = (*get_args(Payload), "int8")
    if not payloads or isinstance(payloads, str) or not set(payloads) <= set(allowed):
        raise CommValueError(f"payloads={payloads!r}; give a list of some of {allowed}")
    size, per_node = topology.num_ranks, topology.gpus_per_node
    if counts is not None and (counts.num_ranks, counts.ranks_per_node) != (size, per_node):
        raise CommValueError(
            f"counts are of {counts.num_ranks} ranks, {counts.ranks_per_node} per node, but the "
            f"topology has {size}, {per_node} per node; count the same ranks"
        )
    found = counts or uniform_counts(workload, topology)
    routes = [route for route in ROUTES if route != "hierarchical" or 1 < per_node < size]
    variants = tuple(
        _plan_variant(route, payload, found, workload, topology)
        for route in routes
        for payload in payloads
    )
    choice = _choose(variants)
    return DispatchPlan(
        workload=workload,
        topology=topology,
        variants=variants,
        choice=choice,
        reason=_reason(choice, variants[0], topology),
    )


def bytes_for_routing(
    topk_idx_WTK: Sequence[Sequence[Sequence[int]]],
    row_format: RowFormat,
    *,
    num_experts: int,
    ranks_per_node: int,
    route: Route,
    quantize_backward: bool = False,
) -> dict[Movement, tuple[WireStage, ...]]:
    """Return for each movement its exchanges with the bytes from each rank to each rank.

    Args:
        topk_idx_WTK: for each rank, for each of its tokens, the chosen experts (`tolist()`), -1 for
            none.
        row_format: of dispatch; combine travels in full, and so do the backwards unless
            `quantize_backward`.
        num_experts: experts of all ranks.
        ranks_per_node: consecutive ranks that form a node; only `hierarchical` depends on it.

    Raises:
        ValueError: the route is unknown; see `count_routing`.
    """
    if route not in ROUTES:
        raise CommValueError(f"route={route!r} is unknown; choose of {ROUTES}")
    counts = count_routing(topk_idx_WTK, num_experts=num_experts, ranks_per_node=ranks_per_node)
    return {
        m: wire_stages(counts, route, m, row_format.during(m, quantize_backward=quantize_backward))
        for m in MOVEMENTS
    }


def _plan_variant(
    route: Route,
    payload: Payload,
    counts: RoutingCounts | UniformCounts,
    workload: Workload,
    topology: Topology,
) -> VariantPlan:
    row_format = workload.row_format(payload)
    movements = []
    for movement in MOVEMENTS:
        there = row_format.during(movement)
        if isinstance(counts, UniformCounts):
            stages = _uniform_loads(route, movement, there, counts, topology)
        else:
            exchanges = wire_stages(counts, route, movement, there)
            stages = [_stage_load(stage, topology) for stage in exchanges]
        times = [stage.seconds for stage in stages]
        seconds = max(times) if topology.streams_stages else sum(times)
        movements.append(MovementPlan(movement=movement, stages=tuple(stages), seconds=seconds))
    return VariantPlan(
        route=route,
        payload=payload,
        copies_per_token=workload.topk * _copies_per_choice(route, counts, topology),
        movements=tuple(movements),
    )


def _copies_per_choice(
    route: Route, counts: RoutingCounts | UniformCounts, topology: Topology
) -> float:
    copies: tuple[float, ...]
    if isinstance(counts, UniformCounts):
        ranks, nodes = topology.num_ranks, topology.nodes
        copies = (counts.choices * ranks, counts.to_rank * ranks, counts.to_node * nodes)
    else:
        matrices = (counts.choices_WW, counts.tokens_WW, counts.tokens_WM)
        copies = tuple(sum(map(sum, matrix)) for matrix in matrices)
    return copies[ROUTES.index(route)] / max(1, copies[0])


def _uniform_loads(
    route: Route,
    movement: Movement,
    row_format: RowFormat,
    counts: UniformCounts,
    topology: Topology,
) -> list[StageLoad]:
    """As the stages of `wire_stages` where all ranks are alike: those of any rank, in one step."""
    nodes, per_node = topology.nodes, topology.gpus_per_node

    def load(name: str, tokens: float, choices: float, near: int, far: int) -> StageLoad:
        if choices < 1:  # then so many of the peers get one row each
            near, far, tokens, choices = round(near * choices), round(far * choices), 1, 1
        size = message_bytes(
            route, movement, row_format, tokens=round(tokens), choices=round(choices)
        )
        inter_bytes = far * size
        per_nic = topology.ranks_per_nic * inter_bytes
        return _load(name, topology, (near * size, inter_bytes, per_nic), (near, far))

    if route != "hierarchical":
        far = topology.num_ranks - per_node
        return [load("ranks", counts.to_rank, counts.choices, per_node - 1, far)]
    between = load("between nodes", counts.to_node, counts.choices * per_node, 0, nodes - 1)
    inside = load("inside nodes", nodes * counts.to_rank, nodes * counts.choices, per_node - 1, 0)
    return [inside, between] if movement in TOWARDS_TOKENS else [between, inside]


def _stage_load(stage: WireStage, topology: Topology) -> StageLoad:
    sent = _one_way(stage.bytes_WW, topology)
    received = _one_way(tuple(zip(*stage.bytes_WW, strict=True)), topology)
    intra_bytes, inter_bytes, nic_bytes, _, _ = map(max, sent, received)
    return _load(stage.name, topology, (intra_bytes, inter_bytes, nic_bytes), sent[3:])


def _one_way(bytes_WW: Sequence[Sequence[int]], topology: Topology) -> tuple[int, ...]:
    """The most that goes one way: bytes inside, between, of a card; messages inside, between."""
    per_node, per_nic = topology.gpus_per_node, topology.ranks_per_nic
    found = []
    for rank, row in enumerate(bytes_WW):
        first = rank // per_node * per_node
        node = row[first : first + per_node]
        near = sum(map(bool, node))
        far = sum(map(bool, row)) - near
        found.append((sum(node) - row[rank], sum(row) - sum(node), near - bool(row[rank]), far))
    intra, inter, near_W, far_W = zip(*found, strict=True)
    nics = (sum(inter[i : i + per_nic]) for i in range(0, len(inter), per_nic))
    return max(intra), max(inter), max(nics), max(near_W), max(far_W)


def _load(
    name: str, topology: Topology, num_bytes: tuple[int, int, int], messages: tuple[int, ...]
) -> StageLoad:
    """Say what bytes (inside, between, of a card) and messages (inside, between) cost."""
    (intra_bytes, inter_bytes, nic_bytes), (near, far) = num_bytes, messages
    # Both levels work at the same time within one exchange.
    seconds = max(topology.intra.seconds(intra_bytes, near), topology.inter.seconds(nic_bytes, far))
    return StageLoad(
        name=name,
        intra_bytes=intra_bytes,
        inter_bytes=inter_bytes,
        nic_bytes=nic_bytes,
        intra_messages=near,
        inter_messages=far,
        seconds=seconds,
    )


def _choose(variants: Sequence[VariantPlan]) -> VariantPlan:
    """The simplest variant that is nearly as fast as the fastest."""
    limit_s = min(variant.forward_s for variant in variants) * (1 + _WORTH)
    return next(variant for variant in variants if variant.forward_s <= limit_s)


def _reason(choice: VariantPlan, simplest: VariantPlan, topology: Topology) -> str:
    if topology.num_ranks == 1:
        return "one rank holds all experts, so nothing travels and the simplest variant serves"
    if choice == simplest:
        return f"nothing is more than {_WORTH:.0%} faster than the simplest variant"
    gain = simplest.forward_s / choice.forward_s
    figure = "inter_bytes" if topology.nodes > 1 else "intra_bytes"
    where = "between" if topology.nodes > 1 else "inside"
    before, after = (v.movement("dispatch").total(figure) for v in (simplest, choice))
    return (
        f"dispatch + combine take {choice.forward_s * 1e3:.3g} ms, {gain:.3g}x faster than "
        f"{simplest}: dispatch moves {after / 1e6:.4g} MB instead of {before / 1e6:.4g} MB per "
        f"rank {where} nodes"
    )
