"""How long the host waits for a peer, and tells of a failure, where devices have a limit too."""

from typing import Any

from moe_pipeline.executor import transport
from moe_pipeline.executor.transport import Transport


def made(timeout_s: float | None, kinds: frozenset[str]) -> Transport:
    group: Any = None
    return Transport(
        forward=group, backward=group, device=None, timeout_s=timeout_s, forward_apart=kinds
    )


def test_a_host_has_told_what_it_found_before_the_limit_of_the_devices() -> None:
    for limit_s in (1.0, 8.0, 24.0, 120.0, 3600.0):
        waits_s = transport._host_limit_s(limit_s)
        assert waits_s is not None
        told_s = made(waits_s, frozenset({"cuda"})).grace_s
        assert 0.7 * limit_s < waits_s < waits_s + told_s < limit_s


def test_without_devices_a_failure_is_told_for_five_seconds_at_most() -> None:
    assert made(1.0, frozenset()).grace_s == 1.0
    assert made(None, frozenset()).grace_s == made(60.0, frozenset()).grace_s == 5.0
