"""Topologies: sizes, shared network cards, link times, presets."""

from dataclasses import FrozenInstanceError, replace

import pytest

from comm_collectives.planning.cost_model import CostCurve
from comm_collectives.planning.topology import PRESETS, Link, Topology, topology_preset

_LINK = Link(curve=CostCurve.line(alpha_s=1.0, bytes_per_s=10.0), message_s=0.5)


def test_link_charges_each_message_after_the_first() -> None:
    assert _LINK.seconds(20, 1) == 3.0
    assert _LINK.seconds(20, 5) == 5.0
    assert _LINK.seconds(0, 0) == 0.0


def test_cards_are_shared_evenly_and_default_to_one_per_rank() -> None:
    topology = Topology(name="mine", nodes=2, gpus_per_node=8, intra=_LINK, inter=_LINK)
    assert (topology.num_ranks, topology.ranks_per_nic) == (16, 1)
    assert replace(topology, nics_per_node=2).ranks_per_nic == 4
    with pytest.raises(ValueError, match="gpus_per_node=8 cannot be shared evenly by nics_per_no"):
        replace(topology, nics_per_node=3)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes=0 must be at least 1"):
        topology_preset("cpu-gloo", nodes=0, gpus_per_node=1)
    with pytest.raises(ValueError, match="gpus_per_node=-1 must be at least 1"):
        topology_preset("cpu-gloo", nodes=1, gpus_per_node=-1)
    with pytest.raises(ValueError, match="message_s=-1 must be finite seconds"):
        Link(curve=_LINK.curve, message_s=-1)
    with pytest.raises(ValueError, match="no topology preset 'abacus'; choose one of h100-nccl"):
        topology_preset("abacus", nodes=1, gpus_per_node=1)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_slower_between_nodes_than_inside(name: str) -> None:
    topology = topology_preset(name, nodes=4, gpus_per_node=6)
    assert (topology.name, topology.nodes, topology.num_ranks) == (name, 4, 24)
    for num_bytes in (0, 1 << 10, 1 << 30):
        inside = topology.intra.seconds(num_bytes, 1)
        between = topology.inter.seconds(num_bytes * topology.ranks_per_nic, 1)
        assert 0 < inside < between


def test_topologies_do_not_change() -> None:
    topology = topology_preset("h100-nccl", nodes=1, gpus_per_node=1)
    with pytest.raises(FrozenInstanceError):
        topology.nodes = 2  # type: ignore[misc]
