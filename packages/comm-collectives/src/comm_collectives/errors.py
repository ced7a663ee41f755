"""What can go wrong between ranks, as exceptions whose text names rank, call and peers.

Invariant: every error of this package is a `CommError`; a user's own mistake (a wrong shape, dtype
or split) is a `ValueError` or `TypeError` as well. Where other ranks wait for the rank that made
it, all of them raise the same class, `RefusedError` or `RefusedTypeError`.

    try:
        y = comm_collectives.all_to_all(x, timeout_s=30)
    except comm_collectives.errors.PeerFailedError as error:
        print(error)  # rank 0: all_to_all call 7 of group (0, 1, 2) ...; did not arrive: rank 2
"""


class CommError(RuntimeError):
    """A transfer between ranks failed, or a call was a mistake; base of every error here."""


class CollectiveTimeoutError(CommError):
    """A transfer did not finish in time, here or on the rank that gave up first.

    The text names the ranks that did not arrive.
    """


class PeerFailedError(CommError):
    """A peer died or closed its connections."""


class MismatchError(CommError):
    """Two ranks entered the same call with arguments that do not fit each other."""


class CommValueError(CommError, ValueError):
    """An argument is wrong on this rank, and no other rank waits for it."""


class CommTypeError(CommError, TypeError):
    """As CommValueError, where the reason is a type or dtype."""


class RefusedError(CommValueError):
    """Arguments of a rank are wrong; raised on every rank of the call, with that rank's reason."""


class RefusedTypeError(RefusedError, CommTypeError):
    """As RefusedError, where the reason is a type or dtype."""


class MutatedInputError(CommError):
    """A tensor was changed in place while a transfer still read it."""


class LostGradientWarning(UserWarning):
    """Gradients arrived for the input of a call whose output this rank's loss does not use."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, which is the one that says something."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


# By the name under which a failure is reported to the other ranks.
ERROR_NAMED = {
    kind.__name__: kind
    for kind in (
        CommError,
        CollectiveTimeoutError,
        MismatchError,
        PeerFailedError,
        RefusedError,
        RefusedTypeError,
    )
}
