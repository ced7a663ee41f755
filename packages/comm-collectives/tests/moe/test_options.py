"""Options are checked when they are made."""

from typing import Any

import pytest

from comm_collectives.moe.options import MoeOptions


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"route": "2dh"}, "route='2dh' is unknown; choose of"),
        ({"payload": "float8"}, "payload='float8' is unknown; choose of"),
        ({"backend": "nccl"}, "backend='nccl' is unknown: 'torch' or a DeepEpBackend"),
        ({"timeout_s": 0}, "timeout_s=0 must be positive"),
        ({"route": "hierarchical"}, "needs ranks_per_node >= 1, not None"),
        ({"route": "hierarchical", "ranks_per_node": 0}, "needs ranks_per_node >= 1, not 0"),
        ({"ranks_per_node": 2}, "is for route='hierarchical'"),
        ({"quantize_backward": True}, "needs a quantised payload"),
        ({"reuse": "handle"}, "reuse is a str; give the handle"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MoeOptions(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"route": "hierarchical", "ranks_per_node": 2.0}, "ranks_per_node=2.0 is a float; give"),
        ({"timeout_s": "3"}, "timeout_s='3' is a str; give seconds"),
    ],
)
def test_numbers_that_are_none_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        MoeOptions(**given)


def test_every_combination_of_route_and_payload_is_accepted() -> None:
    for route, per_node in (("flat", None), ("dedup", None), ("hierarchical", 2)):
        for payload in ("full", "float8_e4m3", "int8"):
            options: dict[str, Any] = {"route": route, "ranks_per_node": per_node}
            quantized = payload != "full"
            made = MoeOptions(**options, payload=payload, quantize_backward=quantized)
            assert (made.route, made.payload, made.quantize_backward) == (route, payload, quantized)
