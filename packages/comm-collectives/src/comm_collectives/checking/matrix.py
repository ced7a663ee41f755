"""Run the correctness matrix on local ranks, and say what is right on this machine and what not.

Cells share one set of processes as long as all goes well. What ends badly is done again alone, in
processes to which nothing has happened yet, and only that counts: what one cell breaks is not put
down to the next, and an abort or a hang costs only the processes in which it happened.

    report = check_machine(2, places=(HERE, WIRE), raw_dtypes=FEW_DTYPES)
    report.problems
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import torch

from comm_collectives.base import DTYPES
from comm_collectives.checking.cells import (
    COLUMNS,
    Case,
    all_cases,
    canaries,
    expected_verdict,
    torch_cases,
)
from comm_collectives.checking.local_ranks import LocalRanks, Reply
from comm_collectives.checking.misuse import MISUSE_OF, MISUSES, RAW, judge_misuse, judge_raw_misuse
from comm_collectives.checking.rank_side import BLIND, HERE, RAW_TORCH, Order, answer
from comm_collectives.checking.results import CaseResult, Verdict, judge
from comm_collectives.errors import CommValueError

FEW_DTYPES = (torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
_BLIND_MISUSE = "same shape, other order"  # which no backend can notice
_LIMIT_S, _RAW_LIMIT_S = 10.0, 1.0
_CELL_S = 20.0  # after which a rank is given up that not even the group's limit stops
_AT_ONCE = 500  # cells that ranks are given at a time
_SETS_AT_ONCE = 5  # sets of ranks that wait for time-outs side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an order, and why."""

    order: Order
    verdict: Verdict
    detail: str = ""

    @property
    def expected(self) -> str:
        """What has to come of it; raw torch is measured by the same."""
        what = self.order.what
        if isinstance(what, Case):
            return expected_verdict(what)
        if self.order.place == BLIND:
            return Verdict.WRONG
        return Verdict.REFUSED if MISUSE_OF[what].raises else Verdict.RIGHT

    @property
    def is_canary(self) -> bool:
        """Whether it had to be found wrong."""
        return self.expected == Verdict.WRONG

    @property
    def is_good(self) -> bool:
        """Whether it ended as it must."""
        return self.verdict == self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All outcomes of one run; those of raw torch are no problems of this package."""

    num_ranks: int
    backend: str
    elapsed_s: float
    outcomes: tuple[Outcome, ...]

    @property
    def problems(self) -> list[str]:
        """One line for each cell or mistake that did not end as it must."""
        return [
            f"{outcome.order.what} ({outcome.order.place}): {outcome.verdict}: {outcome.detail}"
            for outcome in self.outcomes
            if not outcome.is_good and not outcome.is_canary and outcome.order.place != RAW_TORCH
        ]

    @property
    def missed_canaries(self) -> list[str]:
        """The canaries that were not found wrong; with any, nothing else counts."""
        return [
            f"{outcome.order.what} ({outcome.order.place})"
            for outcome in self.outcomes
            if outcome.is_canary and not outcome.is_good
        ]


def check_machine(
    num_ranks: int,
    *,
    places: Sequence[str] = (HERE,),
    dtypes: Sequence[torch.dtype] = DTYPES,
    raw_dtypes: Sequence[torch.dtype] = (),
    backend: str = "gloo",
) -> CheckReport:
    """Start ranks on this machine and run every cell and every mistake on them.

    Args:
        num_ranks: at least 2; one rank alone has nobody to disagree with.
        places: where calls are compared, HERE or WIRE or both.
        dtypes: those of the cells.
        raw_dtypes: those of the cells of raw torch.distributed; none leaves it out.
        backend: of the process groups, "gloo" or "comm_shm"; "cpu:gloo,cuda:nccl" and others that
            name cuda put every tensor on the rank's device (torch.set_default_device), where ranks
            are dealt to the devices in turn.

    Raises:
        ValueError: there are not two ranks.
        CommError: ranks could not be started.
    """
    if num_ranks < 2:
        raise CommValueError(f"world size {num_ranks} must be at least 2")
    started = time.monotonic()
    few = [dtype for dtype in FEW_DTYPES if dtype in dtypes]
    outcomes: list[Outcome] = []
    for place in places:
        # How data moves does not depend on where calls are compared: few dtypes, the second time.
        outcomes += check_cells(num_ranks, place, dtypes if place == places[0] else few, backend)
        outcomes += check_mistakes(num_ranks, place, backend)
    if raw_dtypes:
        outcomes += check_raw(num_ranks, raw_dtypes, backend)
    return CheckReport(
        num_ranks=num_ranks,
        backend=backend,
        elapsed_s=time.monotonic() - started,
        outcomes=tuple(outcomes),
    )


def on_devices(backend: str, num_ranks: int) -> str:
    """Return the backend of groups whose tensors are on CUDA devices; `backend` is of the host's.

    Raises:
        ValueError: there is no device.
    """
    # Unlike is_available(), this leaves CUDA alone, which no process can use that forks ranks.
    count = torch.cuda.device_count()
    if not count:
        raise CommValueError("torch sees no CUDA device; leave out --device, or give cpu")
    return f"cpu:{backend},cuda:{'nccl' if count >= num_ranks else 'gloo'}"


def check_cells(
    num_ranks: int, place: str, dtypes: Sequence[torch.dtype] = DTYPES, backend: str = "gloo"
) -> list[Outcome]:
    """Run every cell on these dtypes, and the canaries among them."""
    cells = [*canaries(), *all_cases(dtypes=dtypes)]
    orders = [Order(cell, place) for cell in cells]
    return _run(orders, num_ranks, backend, _LIMIT_S, _AT_ONCE)


def check_mistakes(num_ranks: int, place: str, backend: str = "gloo") -> list[Outcome]:
    """Make every mistake, and one more with nobody looking, which is a canary."""
    orders = [Order(misuse.name, place) for misuse in MISUSES if misuse.goes_on]
    last = [Order(misuse.name, place) for misuse in MISUSES if not misuse.goes_on]
    blind = Order(_BLIND_MISUSE, BLIND)
    return [
        *_run(orders, num_ranks, backend, _LIMIT_S, 1),
        *_run_each_alone([*last, blind], num_ranks, backend, _LIMIT_S),
    ]


def check_raw(
    num_ranks: int, dtypes: Sequence[torch.dtype], backend: str = "gloo"
) -> list[Outcome]:
    """Run torch.distributed itself: small rows of these dtypes, and the mistakes that it knows."""
    cells = torch_cases(dtypes=dtypes, columns=COLUMNS[:1])
    orders = [Order(cell, RAW_TORCH) for cell in cells if expected_verdict(cell) == Verdict.RIGHT]
    mistakes = [Order(name, RAW_TORCH) for name in RAW]
    return [
        *_run(orders, num_ranks, backend, _RAW_LIMIT_S, _AT_ONCE),
        *_run_each_alone(mistakes, num_ranks, backend, _RAW_LIMIT_S),
    ]


def judge_order(order: Order, results: Sequence[CaseResult]) -> Outcome:
    """Return what came of an order, given its result on every rank."""
    if isinstance(order.what, Case):
        verdict, detail = judge(results)
    else:
        judge_it: Callable[..., tuple[Verdict, str]] = judge_misuse
        if order.place == RAW_TORCH:
            judge_it = judge_raw_misuse
        verdict, detail = judge_it(results, MISUSE_OF[order.what])
    return Outcome(order=order, verdict=verdict, detail=detail)


def _run(
    orders: Sequence[Order], num_ranks: int, backend: str, limit_s: float, at_once: int
) -> list[Outcome]:
    """Run orders in turn, `at_once` of them without waiting for the slowest rank in between."""
    queue = deque(orders)
    found: dict[Order, Outcome] = {}
    while queue:
        with LocalRanks(num_ranks, answer, limit_s=limit_s, backend=backend) as ranks:
            for outcome in _take(queue, ranks, at_once):
                if not _is_clean(outcome):
                    break
                found[outcome.order] = outcome
    again = [order for order in orders if order not in found]
    found |= {o.order: o for o in _run_each_alone(again, num_ranks, backend, limit_s)}
    return [found[order] for order in orders]


def _take(queue: "deque[Order]", ranks: LocalRanks, at_once: int) -> Iterator[Outcome]:
    """Take orders from the head of a queue and yield what comes of each."""
    while queue:
        chunk = list(islice(queue, at_once))
        for order, replies in zip(chunk, ranks.ask(chunk, limit_s=_CELL_S), strict=False):
            queue.popleft()
            yield judge_order(order, _results(replies))


def _is_clean(outcome: Outcome) -> bool:
    """Whether ranks that ended like this can be trusted to be as before."""
    if outcome.order.place == RAW_TORCH:
        return outcome.verdict in (Verdict.RIGHT, Verdict.REFUSED, Verdict.WRONG)
    return outcome.is_good


def _run_each_alone(
    orders: Sequence[Order], num_ranks: int, backend: str, limit_s: float
) -> Iterator[Outcome]:
    """Run each order on ranks of its own, several sets side by side, as most only wait."""
    for at in range(0, len(orders), _SETS_AT_ONCE):
        some = orders[at : at + _SETS_AT_ONCE]
        with ExitStack() as stack:
            asked = []
            for order in some:
                ranks = LocalRanks(num_ranks, answer, limit_s=limit_s, backend=backend)
                asked.append(stack.enter_context(ranks).ask([order], limit_s=_CELL_S))
            for order, replies in zip(some, asked, strict=True):
                yield judge_order(order, _results(next(replies)))


def _results(replies: Sequence[Reply]) -> list[CaseResult]:
    return [
        CaseResult(verdict=Verdict.ABORTED if reply.died else Verdict.TIMED_OUT, detail=reply.lost)
        if reply.lost
        else reply.value
        for reply in replies
    ]
