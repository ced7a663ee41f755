"""One collective call on this rank: agree with the others, move data, name what failed.

Invariant: a call returns with its data in place, or raises a `CommError` naming this rank, the
call, its number, the group's ranks and who is missing, dead or does something else. It never waits
for longer than its limit (the group's own when none is given), and what fails on one rank fails on
the others in the same call.

    call = Call(state, "all_gather", arguments=(Argument("dtype", 11, "float32"),), timeout_s=30)
    agreed = call.exchange([flat] * state.size, lambda agreed: room_for(agreed.sizes))
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from comm_collectives.base.transport import Pending, classify, wait_for
from comm_collectives.call.agreed import Agreed, Place, exchange_alone
from comm_collectives.call.agreement import FLAGS, Comparison, compare
from comm_collectives.call.devices import Launches, is_captured, refuse_captured
from comm_collectives.call.failures import Report, describe_absent, first_failure
from comm_collectives.call.frames import Cargo, Frame, Frames, Notice, memory_of_each, sizes_of
from comm_collectives.call.groups import GroupState, check_timeout
from comm_collectives.call.opening import open_frames
from comm_collectives.call.settling import settle
from comm_collectives.call.signature import (
    Argument,
    CallSignature,
    CallSite,
    SignatureWords,
    Status,
    current_site,
)
from comm_collectives.call.waiting import deny, end_circle, fall_silent, pass_on
from comm_collectives.errors import (
    ERROR_NAMED,
    CommError,
    MismatchError,
    RefusedError,
    RefusedTypeError,
    first_line,
)

BACKWARD_OF = " (backward)"  # ends the name of a call that is the backward of another
Refusal = ValueError | TypeError | None


@final
class Call:
    """One numbered collective of one group on this rank; may make several exchanges in turn.

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
        self.refused: Refusal = None
        try:
            timeout_s = check_timeout(timeout_s)
        except (TypeError, ValueError) as error:
            # The others wait for this rank, so it meets them and tells.
            self.refused, timeout_s = error, None
        self.state = state
        self.name = name
        self.arguments = arguments
        self.timeout_s = timeout_s
        self.site = current_site() if site is None else site
        self.compares_site = compares_site and self.site.is_compared
        self.number = state.next_call()
        self.step = self.transfers = 0  # exchanges so far, and those of the device
        self.is_noted = False  # in the history
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

    def meet(
        self,
        *,
        parts: Sequence[bytes] | None = None,
        status: int = 0,
        refused: Refusal = None,
        sizes: Sequence[int] | None = None,
    ) -> Agreed:
        """Compare this call with those of the other ranks. Collective; see `exchange`.

        `sizes` announces, by rank, bytes that travel on a device afterwards.
        """
        return self.exchange(None, None, parts=parts, status=status, refused=refused, sizes=sizes)

    def exchange(
        self,
        sent: Sequence[torch.Tensor] | None,
        place: Place | None,
        *,
        parts: Sequence[bytes] | None = None,
        status: int = 0,
        refused: Refusal = None,
        sizes: Sequence[int] | None = None,
    ) -> Agreed:
        """Send each rank its data, behind what the ranks compare, and receive theirs. Collective.

        The first exchange of a call compares the calls; later ones find a rank that has left it.

        Args:
            sent: by rank, flat uint8 on the host; not read if `refused`. None for `meet`.
            place: gets what all told and returns, by rank, flat uint8 on the host with room for
                the sizes of `Agreed`. Where it returns a tensor of `sent` for this rank itself,
                nothing is copied.
            parts: by rank, what it alone is told.
            status: flags that every rank shall know of.
            refused: what is wrong with this rank's arguments; every rank then raises.
            sizes: see `meet`.

        Raises:
            RefusedError, RefusedTypeError: arguments of a rank are wrong.
            MismatchError: ranks make different calls.
            CollectiveTimeoutError, PeerFailedError: a rank did not come.
        """
        refused, rank = refused or self.refused, self.state.rank
        refuse_captured(self.name)
        if self.state.launches is not None:
            self.state.launches.check()
        if self.state.is_alone:
            self.go_alone(refused)
            ours = Agreed(
                flags=status,
                parts=list(parts or [b""] * self.state.size),
                sizes=list(sizes or [0] * self.state.size),
            )
            return exchange_alone(rank, sent, place, ours)
        if sent is None or refused is not None:
            sent, cargo = None, Cargo(parts=parts, apart=sizes)
        else:
            payloads, sizes = memory_of_each(sent)
            cargo = Cargo(parts=parts, payloads=payloads)
        if self.state.size == 1:
            self.go_alone(refused)
            agreed = self._agreed({}, status, parts, sizes)
            targets = self._targets(agreed, place)
        else:
            with self._leaving() as frames:
                theirs, flags = self._offer(frames, status, cargo, refused)
                agreed = self._agreed(theirs, flags, parts, sizes)
                targets = self._targets(agreed, place)
                frames.receive(memory_of_each(targets)[0] if targets else None, self)
        if sent is not None and targets and targets[rank].data_ptr() != sent[rank].data_ptr():
            targets[rank].copy_(sent[rank])
        return agreed

    def _offer(
        self, frames: Frames, status: int, cargo: Cargo, refused: Refusal
    ) -> tuple[dict[int, Frame], int]:
        """Offer this call until all ranks are in it; return their frames and flags."""
        while True:
            if not self.step:  # else it takes part in a backward, or goes on with its own
                refused = refused or self.state.pending.take_lost()
            theirs, comparison = self._compare(
                frames, status, cargo if refused is None else Cargo(), refused
            )
            if comparison is None:
                self.number, self.step = self.state.next_call(), 0
                if self.is_noted:
                    self.state.history.add(self.number, self._head(0))
            elif not comparison.awaited or cargo.payloads is None:
                return theirs, comparison.flags
            # else those who take part with zeros now know what comes

    def answer(self) -> None:
        """Meet the others only to take part in the backward in which they are. Collective.

        Raises:
            CommError: what the others' call ends in.
        """
        with self._leaving() as frames:
            self._compare(frames, 0, Cargo(), None)

    def go_alone(self, refused: Refusal) -> None:
        """Raise what is wrong with this rank's arguments, where the ranks do not meet."""
        refused = refused or self.refused
        if refused is not None:
            kind = RefusedTypeError if isinstance(refused, TypeError) else RefusedError
            raise kind(f"{self} refused: {refused}") from refused

    def run(self, start: Callable[[], Pending | None]) -> None:
        """Start a transfer on a device and let what follows wait for it.

        Without a limit the wait is only ordered on the stream. A backward, which has told nobody of
        itself yet, meets the others first if calls are compared at all.

        Raises:
            CommError: the transfer failed; the subclass says how.
        """
        launches, place = Launches.of_call(self.state, self), (self.number, self.transfers)
        if self.is_backward and not self.step and self.state.policy.every and not is_captured():
            self.meet()
        try:
            if self.state.lane is not None and self.state.transport.has_one_order:
                self.state.lane.launch_held(self.limit_s)
            works = [start()] if launches is None else launches.run(self, lambda: [start()], place)
            for work in filter(None, works):
                # A wait that runs into its limit aborts an NCCL communicator: only one.
                wait_for(work, self.timeout_s)
            if launches is not None:
                launches.check()
                self.transfers += 1
        except RuntimeError as error:
            # The backend may still write into the buffers of a transfer that was given up.
            self.state.given_up.append(start)
            if isinstance(error, CommError):
                kind, what = type(error), "ended"
            else:
                kind, what = classify(error, self.timeout_s)
            failed = kind(f"{self} {what}: {first_line(error)}")
            raise self.in_class_of_first(failed) from error

    def is_due(self) -> bool:
        """Whether ranks compare this call ahead of data that may travel on a device. Ask once.

        If not, all ranks have to want a gradient, or none.
        """
        every = self.state.policy.every
        if self.state.size == 1 or every == 0:
            return False
        if self.state.moves_on_host:
            return True
        history = self.state.history
        if is_captured():
            history.compares_next = True  # the first one outside of the graph
            return False
        # While a backward is owed (on every rank alike), a peer may be waiting in it.
        owes = len(self.state.pending) > 0
        meets = self.number % every == 0 or history.compares_next or owes
        history.add(self.number, self._head(0))
        self.is_noted = True
        return meets

    def not_all_here(self, missing: Collection[int], gone: Collection[int]) -> CommError:
        """Return the error for ranks that did not come, of which some are gone for good."""
        kind, text = describe_absent(self.state, missing, gone, self.limit_s)
        return kind(f"{self} {text}")

    def told(self, notice: Notice) -> CommError:
        """Return the error for a call that a peer left with one."""
        kind, rank = ERROR_NAMED.get(notice.kind, CommError), self.state.ranks[notice.peer]
        end_circle(self, notice)
        return kind(f"{self} ended: rank {rank} failed in it with a {notice.kind}: {notice.text}")

    def asked(self, peer: int, question: bytes) -> None:
        """Raise if a peer waits for a transfer of this rank, which does nothing but wait for it."""
        deny(self, peer, question)

    def stuck(self, told: Sequence[bytes]) -> None:
        """Tell who waits for this rank that it waits as well."""
        pass_on(self, told)

    def go_on(self) -> None:
        """Take that back."""
        fall_silent(self)

    def __str__(self) -> str:
        state = self.state
        return f"rank {state.global_rank}: {self.name} call {self.number} of group {state.ranks}"

    def _compare(
        self, frames: Frames, status: int, cargo: Cargo, refused: Refusal
    ) -> tuple[dict[int, Frame], Comparison | None]:
        """Offer this call's next step, and settle what differs; see `settle`."""
        self.step += 1
        head = self._head(status | Status.of(refused))
        signature = head.pack()
        theirs = frames.offer(signature, step=self.step, cargo=cargo, waiter=self)
        own = self.step, signature
        if refused is None and all([(f.step, f.signature) == own for f in theirs.values()]):
            self.state.history.clear()
            return theirs, Comparison(flags=status & FLAGS)
        words = {peer: SignatureWords.unpack(frame.signature) for peer, frame in theirs.items()}
        words[self.state.rank] = SignatureWords.unpack(signature)
        comparison = compare([words[rank] for rank in sorted(words)], head)
        steps = {self.step, *[frame.step for frame in theirs.values()]}
        if comparison.agrees and not comparison.awaited:
            if len(steps) == 1:
                self.state.history.clear()
                return theirs, comparison
            comparison = Comparison(differing=("exchange",))
        frames.drop()
        return theirs, settle(self, frames, comparison, words, refused)

    def serve(self, number: int) -> None:
        """Take part in the backward of another call on behalf of this one."""
        self.state.pending.take(number)(self)

    def describe(self) -> str:
        """Say what the call is, for the other ranks' errors."""
        return self._whole_head(0).describe()

    def word(self) -> int:
        """Return what is the same on all ranks that make the same call."""
        return self._whole_head(0).fingerprint(0)

    def _agreed(
        self,
        theirs: dict[int, Frame],
        flags: int,
        parts: Sequence[bytes] | None,
        sizes: Sequence[int] | None,
    ) -> Agreed:
        """What the frames told, this rank's own among them."""
        own, ranks = self.state.rank, range(self.state.size)
        own_part, own_size = parts[own] if parts else b"", sizes[own] if sizes else 0
        return Agreed(
            flags=flags,
            parts=[own_part if r == own else theirs[r].part for r in ranks],
            sizes=[own_size if r == own else theirs[r].size for r in ranks],
        )

    def _targets(self, agreed: Agreed, place: Place | None) -> Sequence[torch.Tensor]:
        """The memory to which the data of all ranks goes, none for `meet`."""
        targets = () if place is None else place(agreed)
        expected = sizes_of(targets)
        for r in range(len(expected) if expected != agreed.sizes else 0):
            if expected[r] != agreed.sizes[r]:
                raise MismatchError(
                    f"{self}: rank {self.state.ranks[r]} has {agreed.sizes[r]} bytes for this "
                    f"rank, which expects {expected[r]} (at {self.site.text})"
                )
        return targets

    def _head(self, status: int) -> CallSignature:
        if self.step <= 1:
            return self._whole_head(status)
        # What the first step compared need not be compared again.
        return CallSignature(
            name="", number=self.number, site=self.site, compares_site=False, status=status
        )

    def _whole_head(self, status: int) -> CallSignature:
        state = self.state
        return CallSignature(
            name=self.name,
            number=self.number,
            site=self.site,
            arguments=self.arguments,
            compares_site=(self.compares_site or self.site.is_named) and state.policy.call_sites,
            status=status | (Status.BACKWARD if self.is_backward else 0),
            rolling=state.history.rolling,
        )

    @contextmanager
    def _leaving(self) -> Iterator[Frames]:
        """Open the frames; let the other ranks know of an error, and raise it in their class."""
        frames = None
        try:
            frames = open_frames(self.state, self)
            yield frames
        except BaseException as error:
            if frames is not None and self.number > frames.settled:
                frames.fail(self.number, type(error).__name__, first_line(error))
                if not isinstance(error, CommError):
                    self.state.failed_calls.append(self.number)  # as those do who are told
            agreed = self.in_class_of_first(error) if isinstance(error, CommError) else error
            if agreed is error:
                raise
            raise agreed from error

    def in_class_of_first(self, error: CommError) -> CommError:
        """Return the error in the class in which the first rank failed."""
        if self.failure is None:
            rank, problem = self.state.global_rank, type(error).__name__
            own = Report(number=self.number, name=self.name, problem=problem, rank=rank)
            self.failure = first_failure(self.state, own)
        first = self.failure
        kind = ERROR_NAMED.get(first.problem)
        if kind is None or kind is type(error):
            return error
        return kind(
            f"{error}; the first failure was a {first.problem} of rank {first.rank} in "
            f"{first.name} call {first.number}"
        )
