"""Whether a device has one queue for all that it is given (CUDA_DEVICE_MAX_CONNECTIONS=1).

Then a transfer holds up whatever is queued behind it, also of other communicators. Two ranks that
queue two communicators in two orders wait for each other for ever. So asynchronous calls are queued
where the program makes them, which is one order on every rank, and what is queued when a peer's
word comes is refused by name.

    refuse_in_one_queue("send")
"""

import os

from comm_collectives.errors import CommValueError

SETTING = "CUDA_DEVICE_MAX_CONNECTIONS"


def has_one_queue() -> bool:
    """Whether this process' devices have one queue each."""
    return os.environ.get(SETTING) == "1"


def refuse_in_one_queue(name: str) -> None:
    """Raise for a transfer whose place in the queue depends on when a peer's word comes.

    Raises:
        CommValueError: the device has one queue.
    """
    if has_one_queue():
        raise CommValueError(
            f"{name} of a tensor on a device can hang under {SETTING}=1, where it holds up calls "
            "of other groups that a peer has queued before it; leave the variable out or set it "
            "to 2 or more, or move the tensor to the host"
        )
