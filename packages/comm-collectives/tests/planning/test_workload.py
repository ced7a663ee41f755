"""Workloads: known shares of uniform routing, and its counts against random routings."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from comm_collectives.planning.topology import topology_preset
from comm_collectives.planning.wire_bytes import count_routing
from comm_collectives.planning.workload import Workload, share_of_tokens, uniform_counts

V3 = Workload(num_experts=256, topk=8, hidden_size=7168, tokens_per_rank=4096)


@pytest.mark.parametrize(("nodes", "copies"), [(1, 1.0), (2, 1.99), (8, 5.29)])
def test_share_of_nodes_is_the_known_figure(nodes: int, copies: float) -> None:
    assert share_of_tokens(V3, nodes, 256 // nodes) * nodes == pytest.approx(copies, abs=5e-3)


def test_uniform_counts_are_the_mean_of_random_routings() -> None:
    workload = Workload(num_experts=24, topk=4, hidden_size=8, tokens_per_rank=2000)
    topology = topology_preset("cpu-gloo", nodes=3, gpus_per_node=2)
    generator = random.Random(random.randrange(10**9))
    counts = count_routing(
        [[generator.sample(range(24), 4) for _ in range(2000)] for _ in range(6)],
        num_experts=24,
        ranks_per_node=2,
    )
    expected = uniform_counts(workload, topology)
    for matrix, name, pairs in (
        (counts.choices_WW, "choices", 36),
        (counts.tokens_WW, "to_rank", 36),
        (counts.tokens_WM, "to_node", 18),
    ):
        assert sum(map(sum, matrix)) == pytest.approx(getattr(expected, name) * pairs, rel=0.02)


def test_group_limited_routing_is_the_mean_of_random_routings() -> None:
    generator = random.Random(random.randrange(10**9))
    workload = Workload(num_experts=32, topk=3, hidden_size=8, tokens_per_rank=1, nodes_per_token=2)
    topology = topology_preset("cpu-gloo", nodes=4, gpus_per_node=2)
    tokens = []
    for _ in range(20_000):
        nodes = generator.sample(range(4), 2)
        allowed = [e for e in range(32) if e // 8 in nodes]
        tokens.append(generator.sample(allowed, 3))
    for there, size in (("rank", 4), ("node", 8)):
        share = sum(any(e < size for e in chosen) for chosen in tokens) / len(tokens)
        assert share_of_tokens(workload, topology.nodes, size) == pytest.approx(share, rel=0.05), (
            there
        )


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="topk=8 but num_experts=4; a token cannot choose more"):
        replace(V3, num_experts=4)
    with pytest.raises(ValueError, match="topk=8 but nodes_per_token=1 nodes hold 4 experts"):
        uniform_counts(
            replace(V3, num_experts=64, nodes_per_token=1),
            topology_preset("h100-nccl", nodes=16, gpus_per_node=2),
        )
    with pytest.raises(ValueError, match="dtype='int4' is unknown; choose one of float64"):
        replace(V3, dtype="int4")
    with pytest.raises(ValueError, match="tokens_per_rank=0 must be at least 1"):
        replace(V3, tokens_per_rank=0)
    with pytest.raises(ValueError, match="nodes_per_token=-1 must be at least 0"):
        replace(V3, nodes_per_token=-1)
    wrong: Any
    for wrong in (math.nan, 2.5, "8", None):
        for name in ("num_experts", "topk", "hidden_size", "tokens_per_rank", "nodes_per_token"):
            with pytest.raises(TypeError, match=rf"{name}=.*; give an integer"):
                replace(V3, **{name: wrong})
