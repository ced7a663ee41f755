"""One collective call on this rank: meet the others, move data with a limit, name what failed.

Invariant: a call returns with its data in place, or raises a `CommError` naming this rank, the
call, its number, the group's ranks and who is missing, dead or does something else. It never waits
for longer than its limit (the group's own when none is given) plus the few seconds of the enquiry.

    call = Call(state, "all_gather", arguments=(Argument("dtype", 11, "float32"),), timeout_s=30)
    met = call.meet(parts=[b"..."] * state.size)
    call.run(lambda: state.transport.all_gather(target, source), on_cpu=True)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from comm_collectives.base.transport import Pending
from comm_collectives.call.agreement import mismatch_error
from comm_collectives.call.control import Arrival, ControlExchange, MailboxExchange
from comm_collectives.call.failure_consensus import first_failure, in_one_class
from comm_collectives.call.failures import (
    classify,
    dead_ranks,
    describe_absent,
    first_line,
    who_is_missing,
)
from comm_collectives.call.groups import GroupState, check_timeout
from comm_collectives.call.reports import GRACE_S, Report, ask_peers, post, tell_awaited
from comm_collectives.call.settling import settle
from comm_collectives.call.signature import (
    Argument,
    CallSignature,
    CallSite,
    Status,
    current_site,
)
from comm_collectives.call.waiting import wait_for, wait_in_slices
from comm_collectives.errors import (
    ERROR_NAMED,
    CollectiveTimeoutError,
    CommError,
    MismatchError,
    RefusedError,
    RefusedTypeError,
)

T = TypeVar("T")

BACKWARD_OF = " (backward)"  # ends the name of a call that is the backward of another


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What a control exchange gave: flags of all ranks or-ed, what each rank told this one."""

    flags: int
    parts: list[bytes]


@final
class Call:
    """One numbered collective of one group on this rank; may run several transfers in turn.

    `compares_site` is False for a call that programs make from several lines, as with a root.
    """

    def __init__(
        self,
        state: GroupState,
        name: str,
        *,
        arguments: Sequence[Argument] = (),
        timeout_s: float | None = None,
        compares_site: bool = True,
        site: CallSite | None = None,
    ) -> None:
        self.refused: ValueError | TypeError | None = None
        try:
            check_timeout(timeout_s)
        except (TypeError, ValueError) as error:
            # The others wait for this rank, so it meets them and tells.
            self.refused, timeout_s = error, None
        self.state = state
        self.name = name
        self.arguments = arguments
        self.timeout_s = timeout_s
        self.compares_site = compares_site
        self.site = current_site() if site is None else site
        self.number = state.next_call()
        self.saw_dead = False
        self.is_noted = False  # in the history
        self.is_serving = False
        self.meets = True
        self.failure: Report | None = None

    @property
    def is_backward(self) -> bool:
        """Whether this is the backward of an earlier call."""
        return self.name.endswith(BACKWARD_OF)

    @property
    def backward_of(self) -> int | None:
        """The call of which this is the backward."""
        return self.arguments[0].word if self.is_backward else None

    @property
    def limit_s(self) -> float:
        """How long one wait may take, in seconds."""
        return self.state.transport.limit_s if self.timeout_s is None else self.timeout_s

    @in_one_class
    def meet(
        self,
        *,
        parts: Sequence[bytes] | None = None,
        status: int = 0,
        refused: ValueError | TypeError | None = None,
        page: torch.Tensor | None = None,
    ) -> Agreed:
        """Compare this call with those of the other ranks. Collective.

        Args:
            parts: up to INLINE_BYTES for each rank; all ranks give parts, or none does.
            status: flags that every rank shall know of, BACKWARD for the backward of a call.
            refused: what is wrong with this rank's arguments; every rank then raises.
            page: flat uint8 on the host that all ranks may `read`; see `ControlExchange`.

        Raises:
            RefusedError, RefusedTypeError: arguments of a rank are wrong.
            MismatchError: ranks make different calls.
            CollectiveTimeoutError, PeerFailedError: a rank did not come.
        """
        refused = refused or self.refused
        if self.state.size == 1:
            self.go_alone(refused)
            return Agreed(flags=status, parts=list(parts or []))
        control = self._control()
        while True:
            refused = refused or self.state.pending.take_lost()
            head = self._head(status | Status.of(refused))
            met = control.meet(head.pack(), parts, self, page)
            if met.all_equal and refused is None:
                self.state.history.clear()
                return Agreed(flags=status, parts=met.parts)
            comparison = settle(self, control, head, met, refused)
            if comparison is not None:
                return Agreed(flags=comparison.flags, parts=met.parts)
            self.number = self.state.next_call()
            if self.is_noted:
                self.state.history.add(self.number, self._head(0))

    @in_one_class
    def read(self, take: Callable[[torch.Tensor], T]) -> T:
        """Return what `take` makes of the inline pages; see `ControlExchange.read`."""
        return self._control().read(take, self)

    def open_pages(self) -> None:
        """Make room for inline payloads as large as that of this call. Collective."""
        self._control().open_pages(self.state.rank, self.state.transport, self)

    @in_one_class
    def answer(self) -> None:
        """Meet the others only to take part in the backward in which they are. Collective.

        Raises:
            CommError: what the others' call ends in.
        """
        control, head = self._control(), self._head(0)
        met = control.meet(head.pack(), None, self)
        settle(self, control, head, met, None)

    def serve(self, number: int) -> None:
        """Take part in the backward of another call on behalf of this one."""
        self.is_serving = True
        self.state.pending.take(number)(self)
        self.is_serving = False

    def meet_if_due(self, *, status: int = 0, refused: ValueError | TypeError | None = None) -> int:
        """As `meet` without parts, but left out where it costs a transfer and is not due.

        Returns:
            The flags of all ranks, or of this one if there was no control exchange.
        """
        if self.is_due():
            return self.meet(status=status, refused=refused).flags
        self.go_alone(refused)
        return status

    def go_alone(self, refused: ValueError | TypeError | None) -> None:
        """Raise what is wrong with this rank's arguments, where the ranks do not meet."""
        refused = refused or self.refused
        if refused is not None:
            raise self.refusal(refused) from refused

    def meet_backward(self) -> None:
        """Meet for the backward of a call, where the host can do so without stopping a stream."""
        if self.state.control_type == "cpu" and self.state.policy.every:
            self.meet(status=Status.BACKWARD)

    @in_one_class
    def run(self, start: Callable[[], Pending | None], *, on_cpu: bool) -> None:
        """Start a transfer and wait for it.

        On an accelerator without a limit the wait is only ordered on the stream, as torch does it.

        Raises:
            CommError: the transfer failed; the subclass says how.
        """
        try:
            work = start()
            if work is None:
                return
            if on_cpu:
                wait_in_slices(work, self.timeout_s, self._look_around, self.state.transport.clock)
            else:
                # A wait that runs into its limit aborts an NCCL communicator: only one.
                wait_for(work, self.timeout_s)
        except CommError as error:
            # The backend may still write into the buffers of a transfer that was given up.
            self.state.given_up.append(start)
            if str(self) in str(error):
                raise
            # This package's own backend knows the transfer, but not whose it is.
            raise type(error)(f"{self} ended: {error}") from error
        except RuntimeError as error:
            self.state.given_up.append(start)
            raise self._explain(error) from error

    def refusal(self, refused: ValueError | TypeError) -> RefusedError:
        """Return the error for arguments that are wrong here, and let the others know of it."""
        kind = RefusedTypeError if isinstance(refused, TypeError) else RefusedError
        text = f"{self} refused: {refused}"
        if self.state.size > 1:
            self._settle(kind)
            post(self.state, self._report(problem=kind, text=str(refused)))
        return kind(text)

    def not_all_here(self, arrival: Arrival) -> CommError:
        """Return the error for a control exchange to which not all came."""
        kind, text = describe_absent(self.state, arrival, self.limit_s)
        return kind(f"{self} {text}")

    def __str__(self) -> str:
        state = self.state
        return f"rank {state.global_rank}: {self.name} call {self.number} of group {state.ranks}"

    def is_due(self) -> bool:
        """Whether ranks compare this call although it exchanges no counts. Ask once per call.

        If not, all ranks have to want a gradient, or none.
        """
        every = self.state.policy.every
        if self.state.size == 1 or every == 0:
            return False
        # Where control exchanges are nearly free every call has one, and the first call finds out.
        if isinstance(self.state.control, MailboxExchange | None):
            return True
        history = self.state.history
        # While a backward is owed (on every rank alike), a peer may be waiting in it.
        owes = len(self.state.pending) > 0
        self.meets = self.number % every == 0 or history.compares_next or owes
        history.add(self.number, self._head(0))
        self.is_noted = True
        return self.meets

    def _control(self) -> ControlExchange:
        state = self.state
        if state.control is None:
            device = state.control_type
            at = (state.transport, state.rank, state.size)
            state.control = ControlExchange.open(*at, device, self)
        return state.control

    def _head(self, status: int) -> CallSignature:
        state = self.state
        return CallSignature(
            name=self.name,
            number=self.number,
            site=self.site,
            arguments=self.arguments,
            compares_site=(self.compares_site or self.site.is_named) and state.policy.call_sites,
            status=status,
            rolling=state.history.rolling,
        )

    def _report(self, *, problem: type[CommError] | None = None, text: str = "") -> Report:
        head = self._head(0)
        return Report(
            group=self.state.name,
            number=self.number,
            name=self.name,
            failed=problem is not None,
            # Ranks of which only some meet are in different calls as well.
            fingerprint=head.fingerprint(int(self.meets)),
            text=text or head.describe() + self._backwards_to_come(),
            problem="" if problem is None else problem.__name__,
            rank=self.state.global_rank,
        )

    def _backwards_to_come(self) -> str:
        owed = len(self.state.pending)
        return f" with {owed} backward{'s' if owed > 1 else ''} to come" if owed else ""

    def in_class_of_first(self, error: CommError) -> CommError:
        """Return the error in the class in which the first rank failed."""
        first = self._settle(type(error))
        kind = ERROR_NAMED.get(first.problem)
        if kind is None or kind is type(error):
            return error
        return kind(
            f"{error}; the first failure was a {first.problem} of rank {first.rank} in "
            f"{first.name} call {first.number}"
        )

    def _settle(self, kind: type[CommError]) -> Report:
        if self.failure is None:
            self.failure = first_failure(self.state, self._report(problem=kind))
        return self.failure

    def _look_around(self) -> None:
        """While waiting: raise if a peer is dead, or is in another call, or failed in this one."""
        dead = dead_ranks(self.state)
        # Once is no reason: a rank that has done its part may end while its bytes still travel.
        if dead and self.saw_dead:
            raise self.not_all_here(Arrival(missing=dead, dead=dead, withdrawn=()))
        self.saw_dead = bool(dead)
        if isinstance(self.state.control, MailboxExchange):
            return
        if self.is_backward:
            tell_awaited(self.state, self.arguments[0].word)
        own = self._report()
        view = ask_peers(self.state, own, grace_s=0.0)
        for rank, report in sorted(view.reports.items()):
            if report.group == own.group and report.number == own.number:
                self._compare(rank, report, own)

    def _compare(self, rank: int, theirs: Report, own: Report) -> None:
        kind = ERROR_NAMED.get(theirs.problem)
        if kind is not None and issubclass(kind, RefusedError):
            raise kind(f"{self} refused: rank {rank}: {theirs.text}")
        # Ranks that owe a backward take part in it first, and then all meet.
        is_patient = self.is_backward or self.is_serving or len(self.state.pending) > 0
        if theirs.fingerprint != own.fingerprint and not is_patient:
            post(self.state, self._report(problem=MismatchError))
            texts, ranks = [own.text, theirs.text], [self.state.global_rank, rank]
            raise mismatch_error(str(self), ("the call",), texts, ranks)
        if kind is not None:
            who = who_is_missing(self.state, self._report(problem=kind))
            raise kind(f"{self} ended: rank {rank} failed in it with a {theirs.problem}; {who}")

    def _explain(self, error: RuntimeError) -> CommError:
        kind, what = classify(error, self.timeout_s)
        self._settle(kind)  # before the enquiry, which takes its time
        if kind is CommError:
            post(self.state, self._report(problem=kind))
            return CommError(f"{self} {what}: {first_line(error)}")
        dead = dead_ranks(self.state, grace_s=0.0 if kind is CollectiveTimeoutError else GRACE_S)
        if dead:
            return self.not_all_here(Arrival(missing=dead, dead=dead, withdrawn=()))
        who = who_is_missing(self.state, self._report(problem=kind))
        return kind(f"{self} {what}; {who}. Cause: {first_line(error)}")
