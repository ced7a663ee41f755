"""What the words of a backend mean."""

from comm_collectives.base.transport.transport import classify
from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    PeerFailedError,
    first_line,
)


def test_classify_tells_limits_and_lost_peers_apart() -> None:
    assert classify(RuntimeError("Operation timed out!"), 2.0) == (
        CollectiveTimeoutError,
        "timed out after 2 s",
    )
    assert classify(RuntimeError("Connection closed by peer"), None)[0] is PeerFailedError
    assert classify(RuntimeError("Invalid scalar type"), None)[0] is CommError
    assert first_line(RuntimeError("")) == "RuntimeError"
