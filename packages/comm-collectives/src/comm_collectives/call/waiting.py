"""Wait for a transfer of a backend with a limit.

wait_for(work, 30.0)
"""

from datetime import timedelta

from comm_collectives.base.transport import Pending


def wait_for(work: Pending, timeout_s: float | None) -> None:
    """Wait for a transfer; None waits as long as the group allows."""
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))
