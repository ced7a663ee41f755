"""Which rank of a job failed first: whoever fails after it names it, and why it failed.

A rank that fails leaves the others without a peer, and these leave others. What each of them sees
is the loss of its neighbour; what the user has to know is what came first.

    with naming_first_failure():
        train_all_steps()
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

_KEY = "moe_train/first failure"
_ANSWER_S = 2.0  # a store whose host has stopped does not answer


@contextmanager
def naming_first_failure() -> Iterator[None]:
    """Add a note to what is raised inside: what the job's first failing rank has raised.

    Not collective. Without process groups, or where their store is gone, nothing is added.
    """
    try:
        yield
    except Exception as error:
        if not dist.is_initialized():
            raise
        own = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        first = _first(own)
        if first.partition(": ")[2] != own.partition(": ")[2]:
            error.add_note(f"the job's first failure: {first}")
        raise


def _first(own: str) -> str:
    """Return the first text that any rank gave; `own` if that cannot be known."""
    found = [own]

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # the store is gone
            store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            found.append(store.compare_set(_KEY, "", own).decode())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return found[-1]
