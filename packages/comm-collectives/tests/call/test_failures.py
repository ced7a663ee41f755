"""What the words of a backend mean."""

import comm_collectives as cc
from comm_collectives.call.control.mailbox import Arrival
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


def test_limit_that_passes_as_the_last_rank_arrives_is_said_to_be_this_ranks_own() -> None:
    def fn(rank: int, world_size: int) -> tuple[type, str]:
        gave_up = Arrival(missing=(), dead=(), withdrawn=(rank,))
        return describe_absent(group_state(None), gave_up, 3.0)

    kind, text = run_ranks(fn, 3)[1]
    assert kind is CollectiveTimeoutError
    assert text == "timed out after 3 s; arrived too late: the last of rank 0, rank 2"
