"""What can go wrong between ranks, as exceptions whose text names rank, call and peers.

Invariant: every failure of a transfer that this package starts surfaces as a `CommError`; a user's
own mistake (a wrong shape, dtype or split) is a `ValueError` or `TypeError`.

    try:
        y = comm_collectives.all_to_all(x, timeout_s=30)
    except comm_collectives.PeerFailedError as error:
        print(error)  # rank 0: all_to_all call 7 of group (0, 1, 2) ...; did not arrive: rank 2
"""


class CommError(RuntimeError):
    """A transfer between ranks failed; base of every error of this package."""


class CollectiveTimeoutError(CommError):
    """A transfer did not finish in time; the text names the ranks that did not arrive."""


class PeerFailedError(CommError):
    """A peer died, closed its connections, or refused its own arguments in this call."""


class MismatchError(CommError):
    """Two ranks entered the same call with arguments that do not fit each other."""
