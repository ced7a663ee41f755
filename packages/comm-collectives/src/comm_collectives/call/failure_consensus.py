"""One failure of a group, one class of error: the rank that fails first decides for all.

A lost peer looks different from everywhere: one rank has its limit pass, another finds a connection
closed because the first one has given up, a third meets a rank that is gone. Programs branch on the
class of an error, and must branch alike on every rank. So each rank that fails asks the store who
was first, by one atomic operation.

Ranks count their failures. All ranks fail once in each failure of their group, so the counts agree
as long as the group is of any use; a record that cannot be of the same failure is not believed.

    first = first_failure(state, report)          # somebody's report, or this rank's own
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from comm_collectives.call.groups import GroupState
from comm_collectives.errors import CommError

P = ParamSpec("P")
T = TypeVar("T")

_KEY = "comm_collectives/failure/{}/{}"
_ANSWER_S = 1.0  # how much longer than it should take a store may take
_APART = 64  # how many calls ranks may lie apart when they meet the same failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A call that failed: its number and name, the class of the error, the global rank."""

    number: int
    name: str
    problem: str
    rank: int

    def to_json(self) -> str:
        """Return the report as it stands in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Report":
        """Read what `to_json` wrote."""
        return Report(**json.loads(text))


class Failing(Protocol):
    """What can fail on all ranks at once."""

    def in_class_of_first(self, error: CommError) -> CommError:
        """Return the error in the class in which the first rank failed."""


F = TypeVar("F", bound=Failing)


def in_one_class(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Let a method raise the same class of CommError on every rank."""

    @wraps(method)
    def checked(call: F, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(call, *args, **kwargs)
        except CommError as error:
            agreed = call.in_class_of_first(error)
            if agreed is error:
                raise
            raise agreed from error

    return checked


def first_failure(state: GroupState, own: Report) -> Report:
    """Return the report of the rank that failed first; `own` if it is this one, or is not known.

    Not collective: each rank asks when it fails, once.
    """
    failed = state.failed_calls
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
        found.append(Report.from_json(state.store().compare_set(key, "", own.to_json())))
    except (RuntimeError, ValueError):
        return  # without a store every rank goes by what it sees
