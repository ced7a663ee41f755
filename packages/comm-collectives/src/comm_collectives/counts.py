"""The small exchange ahead of a payload: how many rows come, of what kind, and whether all is well.

Every rank sends every peer a few int64 words: a status, a signature of its rows, and its counts. So
one rank's refused arguments, or rows of another width or dtype, end the call on every rank at once,
instead of leaving the others to wait. A rank that refuses its own arguments still takes part.

    received = exchange_counts(call, counts, signature=(code, numel), flags=0, ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm_collectives.calls import Call
from comm_collectives.errors import MismatchError, PeerFailedError

_REFUSED = 1 << 32  # status bit of a rank whose arguments are wrong; lower bits are the caller's
_NUM_STATUS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What must be equal on every rank: words for the wire and how to say them in an error."""

    words: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the peers told: `flags` of every rank or-ed together, and each peer's counts."""

    flags: int
    rows: list[list[int]]


def exchange_counts(
    call: Call,
    group: dist.ProcessGroup,
    counts: Sequence[Sequence[int]],
    *,
    signature: Signature,
    device: torch.device,
    flags: int = 0,
    refused: Exception | None = None,
) -> Counts:
    """Send `counts[r]` to each rank r and return what each rank sent here. Collective.

    Args:
        call: the call under whose name the exchange runs.
        group: the process group of the call.
        counts: one list per rank, all of one length, which is the same on every rank.
        signature: what has to agree between the ranks.
        device: where the words travel.
        flags: bits (below 2^32) that every rank shall know of.
        refused: what is wrong with this rank's arguments; raised here after the exchange.

    Raises:
        PeerFailedError: a peer refused its own arguments.
        MismatchError: a peer's signature differs.
    """
    status = _REFUSED if refused is not None else flags
    head = [status, *signature.words]
    sent = torch.tensor([[*head, *row] for row in counts], dtype=torch.int64, device=device)
    received = torch.empty_like(sent)
    call.run(
        lambda: dist.all_to_all_single(received, sent, group=group, async_op=True),
        on_cpu=device.type == "cpu",
    )
    if refused is not None:
        raise refused
    words: list[list[int]] = received.tolist()
    _check(call, words, signature)
    flags_of_all = 0
    for row in words:
        flags_of_all |= row[0]
    width = _NUM_STATUS + len(signature.words)
    return Counts(flags=flags_of_all, rows=[row[width:] for row in words])


def _check(call: Call, words: list[list[int]], signature: Signature) -> None:
    state = call.state
    head = f"rank {state.global_rank}: {call.name} call {call.number} of group {state.ranks}"
    refusing = [state.ranks[r] for r, row in enumerate(words) if row[0] & _REFUSED]
    if refusing:
        names = ", ".join(f"rank {rank}" for rank in refusing)
        raise PeerFailedError(f"{head}: {names} refused the arguments given there; see its error")
    width = len(signature.words)
    for r, row in enumerate(words):
        theirs = tuple(row[_NUM_STATUS : _NUM_STATUS + width])
        if theirs != signature.words:
            raise MismatchError(
                f"{head}: this rank has {signature.text}, described by {signature.words}, but "
                f"rank {state.ranks[r]} described its rows by {theirs}; pass the same kind of rows"
            )
