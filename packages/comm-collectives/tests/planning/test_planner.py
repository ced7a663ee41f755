"""Plans: known figures of uniform routing, exact figures of given ones, and the choice."""

import random
from dataclasses import asdict, replace
from math import comb
from typing import Any

import pytest

from comm_collectives.planning.cost_model import CostCurve
from comm_collectives.planning.planner import bytes_for_routing, plan_dispatch
from comm_collectives.planning.topology import Link, Topology, topology_preset
from comm_collectives.planning.wire.wire_format import ROUTES
from comm_collectives.planning.wire_bytes import RoutingCounts, count_routing
from comm_collectives.planning.workload import Workload, uniform_counts

# DeepSeek-V3's layer, as DeepEP measures it.
V3 = Workload(num_experts=256, topk=8, hidden_size=7168, tokens_per_rank=4096)


def _random_routing(workload: Workload, ranks: int, seed: int) -> list[list[list[int]]]:
    generator = random.Random(seed)
    return [
        [
            generator.sample(range(workload.num_experts), workload.topk)
            for _ in range(workload.tokens_per_rank)
        ]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize(("nodes", "copies"), [(2, 1.99), (8, 5.29)])
def test_a_token_goes_to_few_nodes(nodes: int, copies: float) -> None:
    plan = plan_dispatch(V3, topology_preset("h100-nccl", nodes=nodes, gpus_per_node=8))
    found = plan.variant("hierarchical", "full").copies_per_token
    assert found == pytest.approx(copies, abs=5e-3)
    assert plan.variant("flat", "full").copies_per_token == 8


def test_hierarchical_sends_7_messages_between_nodes_instead_of_56() -> None:
    plan = plan_dispatch(V3, topology_preset("h100-nccl", nodes=8, gpus_per_node=8))
    for route, between in (("flat", 56), ("dedup", 56), ("hierarchical", 7)):
        dispatch = plan.variant(route, "full").movement("dispatch")
        assert (dispatch.total("inter_messages"), dispatch.total("intra_messages")) == (between, 7)


def test_fp8_dispatch_moves_at_most_0_52_of_bfloat16_and_nothing_else_changes() -> None:
    plan = plan_dispatch(V3, topology_preset("h100-nccl", nodes=8, gpus_per_node=8))
    for route in ROUTES:
        full, fp8 = plan.variant(route, "full"), plan.variant(route, "float8_e4m3")
        for figure in ("inter_bytes", "intra_bytes", "nic_bytes"):
            before, after = (v.movement("dispatch").total(figure) for v in (full, fp8))
            assert 0.5 < after / before < 0.52
        assert full.movements[1:] == fp8.movements[1:]


def test_bytes_of_uniform_routing_are_the_closed_formula() -> None:
    plan = plan_dispatch(V3, topology_preset("h100-nccl", nodes=8, gpus_per_node=8))
    flat = plan.variant("flat", "full").movement("combine")
    assert flat.total("inter_bytes") == 4096 * 8 * 56 // 64 * 14336
    hierarchical = plan.variant("hierarchical", "full").movement("combine")
    missed = comb(224, 8) / comb(256, 8)  # all choices outside a node's 32 experts
    assert hierarchical.total("inter_bytes") == round(4096 * (1 - missed)) * 7 * 14336


def _count_one_by_one(counts_of: list[list[int]], per_node: int) -> dict[str, int]:
    """The busiest rank's bytes of a matrix, pair by pair."""
    size = len(counts_of)
    figures: dict[str, list[int]] = {"intra_bytes": [], "inter_bytes": []}
    for rank in range(size):
        for pairs in ([(rank, p) for p in range(size)], [(p, rank) for p in range(size)]):
            for name, wanted in (("intra_bytes", True), ("inter_bytes", False)):
                figures[name].append(
                    sum(
                        counts_of[a][b]
                        for a, b in pairs
                        if a != b and (a // per_node == b // per_node) == wanted
                    )
                )
    return {name: max(values) for name, values in figures.items()}


def test_plan_of_a_given_routing_shows_its_busiest_rank() -> None:
    workload = Workload(num_experts=12, topk=3, hidden_size=40, tokens_per_rank=30)
    routing = _random_routing(workload, 6, random.randrange(10**9))
    routing[4] = []  # a rank without tokens
    routing[1] = [[0, 1, 2]] * 90  # and one that floods the first ranks
    topology = topology_preset("h100-nccl", nodes=3, gpus_per_node=2)
    counts = count_routing(routing, num_experts=12, ranks_per_node=2)
    plan = plan_dispatch(workload, topology, counts=counts)
    for variant in plan.variants:
        exact = bytes_for_routing(
            routing,
            workload.row_format(variant.payload),
            num_experts=12,
            ranks_per_node=2,
            route=variant.route,
        )
        for movement in variant.movements:
            for load, stage in zip(movement.stages, exact[movement.movement], strict=True):
                want = _count_one_by_one([list(row) for row in stage.bytes_WW], 2)
                assert load.intra_bytes == want["intra_bytes"]
                assert load.inter_bytes == load.nic_bytes == want["inter_bytes"]
                assert load.name == stage.name


def test_shared_card_carries_the_bytes_of_its_ranks() -> None:
    topology = topology_preset("h100-nccl", nodes=2, gpus_per_node=4)
    own, shared = (
        plan_dispatch(V3, replace(topology, nics_per_node=nics)).variant("flat", "full")
        for nics in (4, 2)
    )
    before, after = (v.movement("dispatch").total("nic_bytes") for v in (own, shared))
    assert after == 2 * before
    assert shared.forward_s > 1.9 * own.forward_s


def _topology(intra_s: float, inter_s: float, *, streams: bool = False) -> Topology:
    """Links that only cost latency."""
    intra, inter = (
        Link(curve=CostCurve.line(alpha_s=seconds, bytes_per_s=1e30))
        for seconds in (intra_s, inter_s)
    )
    return Topology(
        name="test",
        nodes=2,
        gpus_per_node=2,
        intra=intra,
        inter=inter,
        streams_stages=streams,
    )


def test_stages_add_up_unless_they_stream() -> None:
    for streams, seconds in ((False, 5.0), (True, 3.0)):
        plan = plan_dispatch(V3, _topology(2.0, 3.0, streams=streams))
        variant = plan.variant("hierarchical", "full")
        assert variant.movement("dispatch").seconds == seconds
        assert (variant.forward_s, variant.backward_s) == (2 * seconds, 2 * seconds)
        # Both levels work at the same time within one exchange.
        assert plan.variant("flat", "full").movement("dispatch").seconds == 3.0


def test_simplest_variant_wins_where_latency_is_all() -> None:
    plan = plan_dispatch(V3, _topology(2.0, 3.0))
    assert str(plan.choice) == "flat full"
    assert "nothing is more than 2% faster" in plan.reason


def test_slow_network_makes_hierarchical_fp8_the_choice_and_full_without_rounding() -> None:
    topology = topology_preset("h100-nccl", nodes=8, gpus_per_node=8)
    assert str(plan_dispatch(V3, topology).choice) == "hierarchical float8_e4m3"
    exact = plan_dispatch(V3, topology, payloads=("full",))
    assert str(exact.choice) == "hierarchical full"
    assert "272.4 MB instead of 411.8 MB per rank between nodes" in exact.reason


def test_top_1_gains_nothing_from_deduplication() -> None:
    workload = replace(V3, topk=1)
    topology = topology_preset("h100-nccl", nodes=8, gpus_per_node=8)
    assert str(plan_dispatch(workload, topology, payloads=("full",)).choice) == "flat full"


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (8, 1)])
def test_hierarchical_is_left_out_where_it_is_dedup(nodes: int, per_node: int) -> None:
    plan = plan_dispatch(V3, topology_preset("h100-nccl", nodes=nodes, gpus_per_node=per_node))
    assert {variant.route for variant in plan.variants} == {"flat", "dedup"}
    with pytest.raises(ValueError, match="no variant hierarchical full; it has flat full"):
        plan.variant("hierarchical", "full")


def test_one_rank_sends_nothing() -> None:
    plan = plan_dispatch(V3, topology_preset("h100-nccl", nodes=1, gpus_per_node=1))
    assert str(plan.choice) == "flat full"
    assert plan.choice.forward_s == plan.choice.backward_s == 0
    assert "nothing travels" in plan.reason


def test_routing_without_tokens_takes_no_bytes() -> None:
    counts = count_routing([[]] * 4, num_experts=8, ranks_per_node=2)
    workload = Workload(num_experts=8, topk=2, hidden_size=4, tokens_per_rank=1)
    plan = plan_dispatch(
        workload, topology_preset("cpu-gloo", nodes=2, gpus_per_node=2), counts=counts
    )
    for variant in plan.variants:
        assert variant.forward_s == variant.copies_per_token == 0


# (nodes of 8, published GB/s of dispatch in fp8 and of combine in bf16): DeepEP, docs/legacy.md,
# "Normal kernels with NVLink and RDMA forwarding": H800, 4,096 tokens, hidden 7168, top-8 experts
# in at most 4 groups. One node: bytes received over NVLink; else bytes sent to nodes. Both count
# the rank's own rank or node too (tests/test_internode.py and test_intranode.py there).
_PUBLISHED = [(1, 153, 158), (2, 43, 43), (4, 58, 57), (8, 51, 50)]


@pytest.mark.parametrize(("nodes", "dispatch_gbs", "combine_gbs"), _PUBLISHED)
def test_predicted_times_are_near_the_published_ones_of_deepep(
    nodes: int, dispatch_gbs: float, combine_gbs: float
) -> None:
    topology = topology_preset("h800-deepep", nodes=nodes, gpus_per_node=8)
    workload = replace(V3, nodes_per_token=min(nodes, 4))
    route = "dedup" if nodes == 1 else "hierarchical"
    variant = plan_dispatch(workload, topology).variant(route, "float8_e4m3")
    copies = variant.copies_per_token * workload.tokens_per_rank
    # The preset's two bandwidths come from the dispatch rows of one node and of four.
    within = 0.03 if nodes in (1, 4) else 0.2
    for movement, row_bytes, gbs in (
        ("dispatch", 7168 + 4 * 56, dispatch_gbs),
        ("combine", 7168 * 2, combine_gbs),
    ):
        published_s = copies * row_bytes / (gbs * 1e9)
        limit = 0.2 if movement == "combine" else within
        assert variant.movement(movement).seconds == pytest.approx(published_s, rel=limit)


def test_numbers_that_do_not_fit_are_refused() -> None:
    topology = topology_preset("h100-nccl", nodes=8, gpus_per_node=8)
    with pytest.raises(ValueError, match="num_experts=250 cannot be shared evenly by ranks=64"):
        plan_dispatch(replace(V3, num_experts=250), topology)
    unknown: Any
    for unknown in ((), "full", ("full", "fp8")):
        with pytest.raises(ValueError, match=r"payloads=.* give a list of some of"):
            plan_dispatch(V3, topology, payloads=unknown)
    unknown = "deduplicated"
    with pytest.raises(ValueError, match="route='deduplicated' is unknown"):
        bytes_for_routing(
            [[]], V3.row_format("full"), num_experts=1, ranks_per_node=1, route=unknown
        )
    other: RoutingCounts = count_routing([[], []], num_experts=256, ranks_per_node=2)
    with pytest.raises(ValueError, match="counts are of 2 ranks, 2 per node, but the topology"):
        plan_dispatch(V3, topology, counts=other)


def test_uniform_routing_is_planned_as_a_routing_of_which_all_counts_are_alike() -> None:
    """The matrices of ranks by ranks are the oracle of what is computed for one rank."""
    topology = replace(topology_preset("h100-nccl", nodes=3, gpus_per_node=4), nics_per_node=2)
    workload = replace(V3, num_experts=96)
    uniform = uniform_counts(workload, topology)
    counts = RoutingCounts(
        ranks_per_node=4,
        choices_WW=((round(uniform.choices),) * 12,) * 12,
        tokens_WW=((round(uniform.to_rank),) * 12,) * 12,
        tokens_WM=((round(uniform.to_node),) * 3,) * 12,
    )
    found = plan_dispatch(workload, topology)
    for variant in plan_dispatch(workload, topology, counts=counts).variants:
        like = found.variant(variant.route, variant.payload)
        assert like.copies_per_token == pytest.approx(variant.copies_per_token, rel=1e-3)
        for movement, other in zip(variant.movements, like.movements, strict=True):
            for stage, alike in zip(movement.stages, other.stages, strict=True):
                figures, wanted = asdict(alike), asdict(stage)
                assert figures.pop("name") == wanted.pop("name")
                assert figures == pytest.approx(wanted, rel=2e-3)


def test_ten_thousand_nodes_are_planned_with_whole_rows_for_some_of_the_ranks() -> None:
    workload = replace(V3, num_experts=160_000)
    plan = plan_dispatch(workload, topology_preset("h100-nccl", nodes=10_000, gpus_per_node=8))
    flat = plan.variant("flat", "full").movement("combine")
    assert plan.variant("flat", "full").copies_per_token == pytest.approx(8)
    sent = 4096 * 8 * 79_992 / 80_000  # of 32,768 choices all but those in the own node
    assert flat.total("inter_messages") == pytest.approx(sent, rel=1e-4)
    assert flat.total("inter_bytes") == pytest.approx(sent * 14336, rel=1e-4)
    copies = plan.variant("hierarchical", "full").copies_per_token
    assert copies == pytest.approx(8, rel=1e-3)
