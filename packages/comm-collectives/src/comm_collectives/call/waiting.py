"""Wait for a transfer with a limit, and look around now and then while waiting.

wait_in_slices(work, 30.0, look_around, clock)    # look_around() may raise instead
"""

from collections.abc import Callable
from datetime import timedelta

from comm_collectives.base.transport import Clock, Pending

# The first look comes late enough that an ordinary call never pays for it.
_FIRST_S = 0.5
_NEXT_S = 0.5
_TOLD_S = 1.0  # for what a completed transfer has to say


def wait_for(work: Pending, timeout_s: float | None) -> None:
    """Wait for a transfer; None waits as long as the group allows."""
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def wait_in_slices(
    work: Pending, timeout_s: float | None, look_around: Callable[[], None], clock: Clock
) -> None:
    """Wait for a transfer on the host, calling `look_around` twice a second.

    Raises:
        RuntimeError: the transfer failed, or the limit passed.
    """
    deadline = None if timeout_s is None else clock.now_s() + timeout_s
    slice_s = _FIRST_S
    while True:
        left_s = None if deadline is None else deadline - clock.now_s()
        is_last = left_s is not None and left_s <= slice_s
        started_s = clock.now_s()
        try:
            work.wait(timedelta(seconds=max(left_s or 0.0, 0.001) if is_last else slice_s))
            return
        except RuntimeError:
            if work.is_completed():
                # It failed, or ended well just after the wait had given up: it tells when asked
                # again.
                work.wait(timedelta(seconds=_TOLD_S))
                return
            # Torch wraps the works of Python backends, and these never say that they are completed;
            # what fails well before the slice is over has not run out of time.
            if is_last or clock.now_s() - started_s < slice_s / 2:
                raise
        look_around()
        slice_s = _NEXT_S
