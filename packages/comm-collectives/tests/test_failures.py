"""What the words of a backend mean."""

import comm_collectives as cc
from comm_collectives.failures import classify, first_line


def test_classify_tells_limits_and_lost_peers_apart() -> None:
    assert classify(RuntimeError("Operation timed out!"), 2.0) == (
        cc.CollectiveTimeoutError,
        "timed out after 2 s",
    )
    assert classify(RuntimeError("Connection closed by peer"), None)[0] is cc.PeerFailedError
    assert classify(RuntimeError("Invalid scalar type"), None)[0] is cc.CommError
    assert first_line(RuntimeError("")) == "RuntimeError"
