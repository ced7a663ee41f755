"""The arguments of a call while this rank looks at them: a mistake is raised on every rank.

with Checks() as checks:
    check_dense(x, "x")
    checks.arguments = (Argument.of_dtype(x.dtype),)
call = checks.call(state, "all_reduce", timeout_s)
"""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import final

from comm_collectives.call.calls import Call, Refusal
from comm_collectives.call.groups import GroupState
from comm_collectives.call.signature import Argument


@final
class Checks(AbstractContextManager["Checks"]):
    """Keeps the TypeError or ValueError of its block, unless something is `refused` already."""

    def __init__(self, refused: Refusal = None) -> None:
        self.refused = refused
        self.arguments: tuple[Argument, ...] = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, TypeError | ValueError):
            return False
        self.refused = self.refused or error
        return True

    def call(
        self,
        state: GroupState,
        name: str,
        timeout_s: float | None = None,
        *,
        compares_site: bool = True,
    ) -> Call:
        """Begin the call. Collective where something is wrong, since all ranks then raise it.

        Raises:
            RefusedError, RefusedTypeError: the arguments of this rank are wrong.
        """
        call = Call(
            state,
            name,
            arguments=() if self.refused is not None else self.arguments,
            timeout_s=timeout_s,
            compares_site=compares_site,
        )
        if self.refused is not None or call.refused is not None:
            call.meet(refused=self.refused)
        return call
