"""Which rank of a job failed first: whoever fails after it names it, and why it failed.

A rank that fails leaves the others without a peer, and these leave others. What each of them sees
is the loss of its neighbour; what the user has to know is what came first. A rank that is stopped
or killed says nothing: it is known by the signs of life that it does not give.

    with naming_first_failure() as alive:
        alive.begin(limit_s=120.0)         # when there are process groups
        train_all_steps()
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_train.jobs.signs_of_life import SignsOfLife, answer_of

_KEY = "moe_train/first failure"
# What a rank may raise that has lost another one, be it by torch or by one of our libraries.
_OF_OTHERS = (RuntimeError, ConnectionError, TimeoutError)
_OWN = (
    ValueError,
    TypeError,
    NotImplementedError,
    RecursionError,
    MemoryError,
    torch.OutOfMemoryError,
)


@contextmanager
def naming_first_failure() -> Iterator[SignsOfLife]:
    """Add notes to what is raised inside: what the job's first failing rank has raised, and which
    ranks give no sign of life, if it may be the loss of a rank.

    Not collective. Without process groups, or where their store is gone, nothing is added.
    """
    alive = SignsOfLife()
    try:
        yield alive
    except Exception as error:
        if not dist.is_initialized():
            raise
        own = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        is_lost, first = _first(_is_of_others(error), own)
        if first.partition(": ")[2] != own.partition(": ")[2]:
            error.add_note(f"the job's first failure: {first}")
        if is_lost and (silent := alive.silent()):
            error.add_note(silent)
        raise
    finally:
        alive.end()


def _is_of_others(error: Exception) -> bool:
    return isinstance(error, _OF_OTHERS) and not isinstance(error, _OWN)


def _first(is_lost: bool, own: str) -> tuple[bool, str]:
    """Return the first of these that any rank gave; this rank's if that cannot be known."""
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    mine = f"{is_lost:d}{own}"
    try:
        first = answer_of(lambda: store.compare_set(_KEY, "", mine).decode())
    except (RuntimeError, TimeoutError):  # it is gone, or its host is stopped
        first = mine
    return first.startswith("1"), first[1:]
