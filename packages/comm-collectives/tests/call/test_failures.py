"""What the words of a backend mean."""

import comm_collectives as cc
from comm_collectives.call.failures import classify, describe_absent, first_line
from comm_collectives.call.groups.groups import group_state
from comm_collectives.errors import CollectiveTimeoutError, PeerFailedError
from ranktest import run_ranks


def test_classify_tells_limits_and_lost_peers_apart() -> None:
    assert classify(RuntimeError("Operation timed out!"), 2.0) == (
        CollectiveTimeoutError,
        "timed out after 2 s",
    )
    assert classify(RuntimeError("Connection closed by peer"), None)[0] is PeerFailedError
    assert classify(RuntimeError("Invalid scalar type"), None)[0] is cc.CommError
    assert first_line(RuntimeError("")) == "RuntimeError"


def test_ranks_that_are_gone_are_told_from_those_that_are_late() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[type, str]]:
        state = group_state(None)
        return [describe_absent(state, [2], [2], 3.0), describe_absent(state, [2], [], 3.0)]

    lost, late = run_ranks(fn, 3)[1]
    assert lost == (PeerFailedError, "lost a peer: rank 2 has ended or given up its group")
    assert late[0] is CollectiveTimeoutError
    assert late[1] == (
        "timed out after 3 s; did not arrive: rank 2 (not seen in this group yet); arrived: rank 0"
    )
