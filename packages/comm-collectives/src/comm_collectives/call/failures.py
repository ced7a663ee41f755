"""Say what went wrong with a transfer, who is to blame, and in which class all ranks raise it.

A lost peer looks different from everywhere, and programs branch on the class of an error. So each
rank that fails asks the store who was first, by one atomic operation. All ranks fail once in each
failure of their group, and count; a record that cannot be of the same failure is not believed.

    kind, text = describe_absent(state, missing=[2], gone=[], limit_s=30)
    first = first_failure(state, report)          # somebody's report, or this rank's own
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import SignatureWords
from comm_collectives.errors import CollectiveTimeoutError, CommError, PeerFailedError

_KEY = "comm_collectives/failure/{}/{}"
_ANSWER_S = 1.0  # how much longer than it should take a store may take
_APART = 64  # how many calls ranks may lie apart when they meet the same failure


def describe_absent(
    state: GroupState, missing: Collection[int], gone: Collection[int], limit_s: float
) -> tuple[type[CommError], str]:
    """Return the kind of error and its text for a call to which not all ranks came.

    `missing` are ranks inside the group, of which those in `gone` have ended.
    """
    if gone:
        names = _names(state, gone)
        return PeerFailedError, f"lost a peer: {names} has ended or given up its group"
    arrived = [r for r in range(state.size) if r != state.rank and r not in missing]
    absent = ", ".join(f"rank {state.ranks[r]}{_last_seen(state, r)}" for r in missing)
    text = f"timed out after {limit_s:g} s; did not arrive: {absent}"
    if arrived:
        text += f"; arrived: {_names(state, arrived)}"
    return CollectiveTimeoutError, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A call that failed: its number and name, the class of the error, the global rank."""

    number: int
    name: str
    problem: str
    rank: int


def first_failure(state: GroupState, own: Report) -> Report:
    """Return the report of the rank that failed first; `own` if it is this one, or is not known.

    Not collective: each rank asks when it fails, once.
    """
    failed, missed = state.failed_calls, set() if state.frames is None else state.frames.missed
    failed += sorted(missed)  # in these, others have failed
    missed.clear()
    key = _KEY.format(state.name, len(failed))
    last = failed[-1] if failed else 0
    failed.append(own.number)
    found: list[Report] = []
    state.transport.clock.aside(lambda: _ask(state, key, own, found), _ANSWER_S)
    if not found or not last < found[0].number or abs(found[0].number - own.number) > _APART:
        return own
    return found[0]


def _ask(state: GroupState, key: str, own: Report, found: list[Report]) -> None:
    try:
        first = state.store().compare_set(key, "", json.dumps(asdict(own)))
        found.append(Report(**json.loads(first)))
    except (RuntimeError, ValueError):
        return  # without a store every rank goes by what it sees


def _names(state: GroupState, ranks: Collection[int]) -> str:
    return ", ".join(f"rank {state.ranks[rank]}" for rank in ranks)


def _last_seen(state: GroupState, rank: int) -> str:
    frame = None if state.frames is None else state.frames.last_seen(rank)
    if frame is None:
        return " (not seen in this group yet)"
    words = SignatureWords.unpack(frame.signature)
    return f" (last in {words.operation_name} call {words.number})"
