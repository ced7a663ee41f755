"""Ranks that make different calls: every pair of public calls, and every other way to disagree.

After a warm-up in which all make the same calls, the last rank makes one call and the others make
another, or each rank a third one; with the default policy, on one host and across hosts (ranks
that share no memory). What must follow is the same named error on every rank, soon, and a group
that works afterwards. `benchmarks/comm_collectives_pairs.py` runs all of them; the tests a sample.
"""

import functools
import itertools
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.checking.local_ranks import LocalRanks, Reply
from comm_collectives.collectives import drop_in
from comm_collectives.errors import LostGradientWarning, MismatchError
from comm_collectives.moe import OverlappedMoe, combine_async, dispatch_async
from ranktest import can_leave_shared_memory, leave_shared_memory, more_than_sockets_hold

ONE_HOST, ACROSS_HOSTS = "one host", "across hosts"
SIZES = (2, 40_000)  # rows of four numbers for each rank: less and more than fits into one message
GROUP_LIMIT_S = 8.0  # what a call that nothing ends waits for
AFTER_S = 5.0
_NUMBER = re.compile(r"(call|transfer|tag) \d+")
# A line of this file, or a name given to it.
_SITE = re.compile(r"\bat ((\w+/)*\w+\.py:\d+|step \d)")
GIVE_UP_S = 30.0
OWN_ERROR = KeyError  # what a program raises itself on one rank, and goes on: no error of ours


@dataclass(frozen=True)
class Place:
    """A rank, how many there are, and the rows of its tensor for each of them."""

    rank: int
    size: int
    rows: int

    def x(self, *, grad: bool = False) -> torch.Tensor:
        return torch.ones(self.size * self.rows, 4, requires_grad=grad)

    @property
    def peer(self) -> int:
        """The other end of a transfer, which is between the first and the last rank."""
        return 0 if self.rank else self.size - 1

    @property
    def splits(self) -> list[int]:
        return [self.rows] * self.size

    @property
    def experts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices and weights of the tokens of `x`: one of each expert in turn."""
        tokens = self.size * self.rows
        return (torch.arange(tokens) % self.size).view(-1, 1), torch.ones(tokens, 1)

    def dispatched(self, x: torch.Tensor) -> "cc.moe.Dispatched":
        return cc.dispatch(x, *self.experts, num_experts=self.size, group=dist.group.WORLD)


def overlapped(at: Place, x: torch.Tensor) -> torch.Tensor:
    moe = OverlappedMoe(num_experts=at.size, group=dist.group.WORLD)
    return moe(x, *at.experts, lambda sent: sent.x * 2)


def _bucketed(at: Place) -> None:
    cc.reduce_in_buckets([at.x(), at.x()])


def _overlaps(at: Place) -> None:
    weight = torch.nn.Parameter(at.x())
    with cc.overlap_gradients([weight]):
        (weight * 2).sum().backward()


Forward = Callable[..., torch.Tensor]
# Each stands on a line of its own: two lines are two calls.
DIFFERENTIABLE: dict[str, Forward] = {
    "all_reduce": lambda at, x, **how: cc.all_reduce(x, **how),
    "all_to_all": lambda at, x, **how: cc.all_to_all(x, **how),
    "all_to_all splits": lambda at, x, **how: cc.all_to_all(
        x, input_splits=at.splits, output_splits=at.splits, **how
    ),
    "all_gather": lambda at, x, **how: cc.all_gather(x, **how),
    "reduce_scatter": lambda at, x, **how: cc.reduce_scatter(x, **how),
    "broadcast": lambda at, x, **how: cc.broadcast(x, src=0, **how),
    "gather": lambda at, x, **how: cc.gather(x, dst=0, **how),
    "scatter": lambda at, x, **how: cc.scatter([x] * at.size, src=0, **how),
}
PLAIN: dict[str, Callable[[Place], object]] = {
    "broadcast_nested": lambda at: cc.broadcast_nested({"x": at.x()}, src=0),
    "reduce_in_buckets": _bucketed,
    "overlap_gradients": _overlaps,
    "dispatch_async": lambda at: dispatch_async(
        at.x(), *at.experts, num_experts=at.size, group=dist.group.WORLD
    ).wait(),
    "drop_in.all_reduce": lambda at: drop_in.all_reduce(at.x()),
    "drop_in.broadcast": lambda at: drop_in.broadcast(at.x(), src=0),
    "drop_in.all_to_all_single": lambda at: drop_in.all_to_all_single(at.x(), at.x()),
    "drop_in.all_gather_into_tensor": lambda at: drop_in.all_gather_into_tensor(
        torch.empty(at.size * at.size * at.rows, 4), at.x()
    ),
    "drop_in.reduce_scatter_tensor": lambda at: drop_in.reduce_scatter_tensor(
        torch.empty(at.rows, 4), at.x()
    ),
}
RECEIVES: dict[str, Callable[[Place], object]] = {
    "recv": lambda at: cc.recv(src=at.peer),
    "recv_tensors": lambda at: cc.recv_tensors(src=at.peer),
    "drop_in.recv": lambda at: drop_in.recv(torch.empty(at.rows), src=at.peer, tag=1),
}
LARGE = more_than_sockets_hold() // 4  # floats that find no room under way


@functools.cache
def _large() -> torch.Tensor:
    return torch.ones(LARGE)


TRANSFERS: dict[str, Callable[[Place], object]] = {
    **RECEIVES,
    "large send": lambda at: cc.send(_large(), dst=at.peer),
    "large isend_tensors": lambda at: cc.isend_tensors([_large()], dst=at.peer).wait(),
}
MOE: dict[str, Callable[[Place, torch.Tensor], torch.Tensor]] = {
    "dispatch": lambda at, x: at.dispatched(x).x,
    "OverlappedMoe": overlapped,
}


def _total(y: "torch.Tensor | Sequence[torch.Tensor]") -> torch.Tensor:
    """A loss of whatever a call returned; gather returns a tensor for each rank, or none."""
    parts = [y] if isinstance(y, torch.Tensor) else list(y)
    return torch.stack([part.sum() for part in parts]).sum()


def prepared(call: str, at: Place) -> Callable[[], object]:
    """Make what comes before a call, on which all ranks agree, and return the call itself."""
    name, _, variant = call.partition(", ")
    if name in PLAIN:
        return lambda: PLAIN[name](at)
    if name in TRANSFERS:
        return lambda: TRANSFERS[name](at)
    if name == "combine":
        sent = at.dispatched(at.x(grad=variant == "backward"))
        if variant == "async":
            return lambda: combine_async(sent.x * 2, sent.handle).wait()
        return _variant(lambda y: cc.combine(y, sent.handle), sent.x * 2, variant)
    x = at.x(grad=variant in ("grad", "backward"))
    if name in MOE:
        return _variant(lambda x: MOE[name](at, x), x, variant)
    return _variant(lambda x, **how: DIFFERENTIABLE[name](at, x, **how), x, variant)


def _variant(forward: Forward, x: torch.Tensor, variant: str) -> Callable[[], object]:
    if variant == "async":
        return lambda: forward(x, async_op=True).wait()
    if variant == "backward":
        loss = _total(forward(x))
        return loss.backward
    return lambda: forward(x)


CALLS = (
    *(f"{name}{how}" for name in DIFFERENTIABLE for how in ("", ", grad", ", async", ", backward")),
    *(f"{name}{how}" for name in MOE for how in ("", ", grad", ", backward")),
    *(f"combine{how}" for how in ("", ", async", ", backward")),
    *PLAIN,
)
# Calls that stand rightly on several lines: two of them are one call of the group.
_ROOTED = ("broadcast", "drop_in.broadcast", "gather", "scatter", "broadcast_nested")


def differ(first: str, second: str) -> bool:
    """Whether these are two calls: the same one with a gradient, or asynchronous, is not."""
    (one, _, how), (other, _, other_how) = first.partition(", "), second.partition(", ")
    if "backward" in (how, other_how):
        return first != second
    same_rooted = one in _ROOTED and one.rpartition(".")[2] == other.rpartition(".")[2]
    return one != other and not same_rooted


@dataclass(frozen=True)
class Cell:
    """Who calls what: a name of CALLS for each rank, or the name of one of WAYS on every rank."""

    calls: tuple[str, ...]
    rows: int

    @property
    def name(self) -> str:
        what = " | ".join(self.calls if len(set(self.calls)) > 1 else self.calls[:1])
        return f"{what} ({self.rows} rows)"


@dataclass(frozen=True)
class Ended:
    """How a rank ended: `error` is the class of what it raised, "" if it returned."""

    error: str = ""
    text: str = ""
    elapsed_s: float = 0.0
    stalled_s: float = 0.0  # of that, with work to do and no processor for it
    after: str = ""  # what is wrong with the group afterwards
    is_idle: bool = False  # it has no part in the transfer that the others make


def pairs(world_size: int) -> list[Cell]:
    """Every two different calls: the second on the last rank, the first on the others."""
    return [
        Cell((one,) * (world_size - 1) + (other,), rows)
        for (one, other), rows in zip(
            (pair for pair in itertools.permutations(CALLS, 2) if differ(*pair)),
            itertools.cycle(SIZES),
            strict=False,
        )
    ]


def transfers(world_size: int) -> list[Cell]:
    """Every receive against every other, every transfer against every call, both ways round.

    Ranks between the first and the last, which wait for each other, leave their transfer out.
    """
    # A call on a thread of its own does not hold up the program, and may wait to its limit.
    calls = [c for c in CALLS if not (c.endswith((", grad", "async")) or "verlap" in c)]
    two = [
        *itertools.product(RECEIVES, repeat=2),
        *itertools.product(TRANSFERS, calls),
        *itertools.product(calls, TRANSFERS),
    ]
    return [
        Cell((one,) * (world_size - 1) + (other,), rows)
        for (one, other), rows in zip(two, itertools.cycle(SIZES), strict=False)
    ]


def triples(world_size: int, count: int, chance: random.Random) -> list[Cell]:
    """Three calls that all differ, by rank in turn."""
    cells: list[Cell] = []
    while len(cells) < count and world_size > 2:
        three = chance.sample(CALLS, 3)
        if all(differ(*two) for two in itertools.combinations(three, 2)):
            calls = tuple(three[rank % 3] for rank in range(world_size))
            cells.append(Cell(calls, chance.choice(SIZES)))
    return cells


def _leaves_graph(call: str) -> bool:
    return call in WAYS or _is_moe(call) or call.endswith((", grad", ", backward"))


def _is_moe(call: str) -> bool:
    return call.startswith((*MOE, "combine"))  # "dispatch" of dispatch_async as well


def answer(message: Cell | str) -> Ended:
    """Do on this rank what a cell says. Collective, in the default group."""
    warnings.simplefilter("ignore", LostGradientWarning)
    rank, size = dist.get_rank(), dist.get_world_size()
    if message == ACROSS_HOSTS:
        leave_shared_memory()
        return Ended()
    if message == ONE_HOST:
        return Ended()
    if message == "warm-up":
        for call in CALLS:
            if not call.endswith(", grad") and not _is_moe(call):  # which leave backwards open
                prepared(call, Place(rank, size, SIZES[0]))()
        _large()  # whose making is no part of a call
        if rank == 0:
            cc.send(torch.ones(3), dst=size - 1)
        elif rank == size - 1:
            cc.recv(src=0)
        return Ended()
    assert isinstance(message, Cell)
    at = Place(rank, size, message.rows)
    if message.calls[0] in WAYS:
        ended = _timed(lambda: WAYS[message.calls[0]](at))
    else:
        mine = {call: prepared(call, at) for call in dict.fromkeys(message.calls)}
        is_idle = message.calls[rank] in TRANSFERS and 0 < rank < size - 1
        ended = Ended(is_idle=True) if is_idle else _timed(mine[message.calls[rank]])
        mine.clear()
    is_ahead = ended.is_idle or WAYS.get(message.calls[0]) is _raise_in_experts
    after = _problem_afterwards(at, ahead=int(is_ahead))
    if any(call in TRANSFERS for call in message.calls):
        after = after or _transfer_afterwards(at)
    return replace(ended, after=after)


def _timed(run: Callable[[], object]) -> Ended:
    started, stalled_s = time.monotonic(), _stalled_s()
    ended = Ended()
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever a rank raises is judged
        ended = Ended(type(error).__name__, str(error))
    elapsed_s = time.monotonic() - started
    return replace(ended, elapsed_s=elapsed_s, stalled_s=_stalled_s() - stalled_s)


def _stalled_s() -> float:
    """How long this thread has waited for a processor, which an idle machine has at once."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0  # not told here: all time counts


def _problem_afterwards(at: Place, *, ahead: int) -> str:
    """`ahead` calls that some ranks had issued already are disagreements of their own."""
    try:
        total = cc.all_reduce(torch.tensor([at.rank + 1]), timeout_s=AFTER_S)
    except MismatchError as error:
        return _problem_afterwards(at, ahead=ahead - 1) if ahead else str(error)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "" if int(total) == at.size * (at.size + 1) // 2 else f"adds up to {int(total)}"


def _transfer_afterwards(at: Place) -> str:
    """Both ways between the ends; what came to nothing before is read, and goes to nobody."""
    if at.rank not in (0, at.size - 1):
        return ""
    try:
        sent = cc.isend_tensors([torch.tensor(at.rank)], dst=at.peer, timeout_s=AFTER_S)
        (got,) = cc.recv_tensors(src=at.peer, timeout_s=AFTER_S)
        sent.wait()
    except cc.CommError as error:
        return f"{type(error).__name__}: {error}"
    return "" if int(got) == at.peer else f"{int(got)} came from rank {at.peer}"


def judge(replies: Sequence[Reply], within_s: float, wanted: str = "MismatchError") -> str:
    """What is wrong with how a cell ended, "" for nothing; begins with the kind of the fault.

    For as long as the machine held up one rank, beside other work, the others may be later.
    """
    for kind, lost in (("abort", True), ("hang", False)):
        for rank, reply in enumerate(replies):
            if reply.lost and reply.died == lost:
                return f"{kind}: rank {rank} {reply.lost}"
    ends: list[Ended] = [reply.value for reply in replies]
    after = [f"rank {rank}: {end.after}" for rank, end in enumerate(ends) if end.after]
    ends = [end for end in ends if end.error != OWN_ERROR.__name__ and not end.is_idle]
    said = "; ".join(f"rank {r}: {end.error}: {end.text}" for r, end in enumerate(ends))
    slowest = max(ends, key=lambda end: end.elapsed_s)
    stalled_s = max(end.stalled_s for end in ends)
    faults = {
        "silent": not all(end.error for end in ends),
        "nameless": not all("rank" in e.text and _NUMBER.search(e.text) for e in ends),
        "unequal": len({end.error for end in ends}) > 1,
        "other error": ends[0].error != wanted or not _SITE.search(ends[0].text),
        f"late: {slowest.elapsed_s:.1f} s": slowest.elapsed_s - stalled_s > within_s,
        f"group broken: {'; '.join(after)}": bool(after),
    }
    return next((f"{kind}: {said}" for kind, is_so in faults.items() if is_so), "")


def run_cells(
    cells: Sequence[Cell], place: str, *, within_s: float = GROUP_LIMIT_S
) -> Iterator[tuple[Cell, str]]:
    """Run cells of one number of ranks; those that end badly cost the ranks, others share them."""
    # Graphs that a cell leaves behind shall not help the next one: those without come first.
    left = sorted(cells, key=lambda cell: any(map(_leaves_graph, cell.calls)))
    while left:
        size = len(left[0].calls)
        with LocalRanks(size, answer, limit_s=GROUP_LIMIT_S) as ranks:
            for replies in ranks.ask([place, "warm-up"], limit_s=GIVE_UP_S):
                if any(reply.lost for reply in replies):
                    raise AssertionError(f"{place}, {size} ranks, before any cell: {replies}")
            good = True
            while left and good:
                cell = left.pop(0)
                (replies,) = ranks.ask([cell], limit_s=GIVE_UP_S)
                wanted = ENDS_IN.get(cell.calls[0], "MismatchError")
                problem = judge(replies, within_s, wanted)
                good = not problem
                yield cell, problem


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise OWN_ERROR("out of luck in backward")


def _raise_in_backward(at: Place) -> None:
    x = at.x(grad=True)
    sent = at.dispatched(x)
    y = sent.x * 2
    if at.rank == at.size - 1:
        y = _RaisesInBackward.apply(y)
    cc.combine(y, sent.handle).sum().backward()


def _raise_in_experts(at: Place) -> None:
    def experts(sent: "cc.moe.Dispatched") -> torch.Tensor:
        if at.rank == at.size - 1:
            raise OWN_ERROR("out of luck in an expert")
        return sent.x

    moe = OverlappedMoe(num_experts=at.size, group=dist.group.WORLD, num_chunks=2)
    try:
        moe(at.x(), *at.experts, experts)
    except OWN_ERROR:  # as a loop that skips a bad batch, while the others wait in this one
        cc.all_gather(torch.ones(3))


def _other_graph_first(at: Place) -> None:
    losses = [(i + 1) * cc.all_to_all(at.x(grad=True)).sum() for i in range(2)]
    for loss in losses if at.rank == at.size - 1 else losses[::-1]:
        loss.backward()


def _swapped_handles(at: Place) -> None:
    first, second = at.dispatched(at.x()), at.dispatched(at.x() * 2)
    cc.combine(first.x, (second if at.rank == at.size - 1 else first).handle)


def _other_splits(at: Place) -> None:
    expected = list(at.splits)
    if at.rank == at.size - 1:
        expected[0] += 1
    cc.all_to_all(at.x(), input_splits=at.splits, output_splits=expected)


def _other_row_shape(at: Place) -> None:
    cc.all_gather(at.x().view(-1, 2 if at.rank == at.size - 1 else 4))


def _other_op(at: Place) -> None:
    cc.all_reduce(at.x(), op="max" if at.rank == at.size - 1 else "sum")


def _other_root(at: Place) -> None:
    cc.broadcast(at.x(), src=at.size - 1 if at.rank == at.size - 1 else 0)


def _other_length(at: Place) -> None:
    cc.all_reduce(at.x()[: -1 if at.rank == at.size - 1 else None])


def _other_dtype(at: Place) -> None:
    cc.reduce_scatter(at.x().int() if at.rank == at.size - 1 else at.x())


def _skips_named_step(at: Place) -> None:
    for step in range(4):
        if at.rank == at.size - 1 and step == 2:
            continue
        with cc.call_site(f"step {step}"):
            cc.all_reduce(at.x())


def _skips_step(at: Place) -> None:
    for _ in range(3 if at.rank == at.size - 1 else 4):
        cc.all_reduce(at.x())
    cc.all_gather(at.x())


def _async_in_other_order(at: Place) -> None:
    if at.rank == at.size - 1:
        handles = [cc.all_gather(at.x(), async_op=True), cc.all_reduce(at.x(), async_op=True)]
    else:
        handles = [cc.all_reduce(at.x(), async_op=True), cc.all_gather(at.x(), async_op=True)]
    for handle in handles:
        handle.wait()


def _raw_torch_beside(at: Place) -> None:
    """Raw calls of the group, on which all agree, beside ours: in another order on one rank."""
    raw, is_odd = torch.ones(3), at.rank == at.size - 1
    if is_odd:
        dist.all_reduce(raw)
    handle = cc.all_reduce(at.x(), async_op=True)
    if not is_odd:
        dist.all_reduce(raw)
    assert handle.wait().sum() == at.x().sum() * at.size
    other = cc.all_gather(at.x(), async_op=True) if is_odd else cc.all_reduce(raw, async_op=True)
    dist.all_reduce(raw)
    other.wait()


# A rank that cannot go on with its experts says so in the combine, as for bad arguments.
ENDS_IN = {"overlapped experts raise on one rank": "RefusedError"}
WAYS: dict[str, Callable[[Place], None]] = {
    "a backward raises on one rank": _raise_in_backward,
    "overlapped experts raise on one rank": _raise_in_experts,
    "two graphs differentiated in another order": _other_graph_first,
    "combine: handles swapped": _swapped_handles,
    "all_to_all: other splits": _other_splits,
    "all_gather: other rows": _other_row_shape,
    "all_reduce: other op": _other_op,
    "all_reduce: other length": _other_length,
    "broadcast: other root": _other_root,
    "reduce_scatter: other dtype": _other_dtype,
    "a loop skips a named step": _skips_named_step,
    "a loop skips a step": _skips_step,
    "asynchronous calls in another order": _async_in_other_order,
    "raw torch calls beside": _raw_torch_beside,
}


def ways(world_size: int) -> list[Cell]:
    """The other disagreements, with little and with much data."""
    return [Cell((name,) * world_size, rows) for name in WAYS for rows in SIZES]


@pytest.mark.parametrize("place", [ONE_HOST, ACROSS_HOSTS])
@pytest.mark.parametrize("world_size", [2, 3])
def test_different_calls_end_in_the_same_error_on_every_rank(world_size: int, place: str) -> None:
    if place == ACROSS_HOSTS and not can_leave_shared_memory():
        pytest.skip("ranks cannot have a /dev/shm of their own here: no mount namespaces")
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")  # a failure shows it
    chance = random.Random(seed)
    cells = [
        *chance.sample(pairs(world_size), 60),
        *triples(world_size, 10, chance),
        *chance.sample(ways(world_size), 12),
        *chance.sample(transfers(world_size), 8),
    ]
    bad = [f"{cell.name}: {problem}" for cell, problem in run_cells(cells, place) if problem]
    assert bad == []


_RIGHT = Ended("MismatchError", "rank 0: call 3 at a.py:3", 0.1)


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ([_RIGHT] * 2, ""),
        ([Ended(), Ended()], "silent"),
        ([_RIGHT, Ended()], "silent"),
        ([Ended("RuntimeError", "timed out", 0.1)] * 2, "nameless"),
        ([Ended("CommError", "rank 0: call 3 at a.py:3", 0.1)] * 2, "other error"),
        ([Ended("MismatchError", "rank 0: call 3 somewhere", 0.1)] * 2, "other error"),
        ([replace(_RIGHT, elapsed_s=2.1)] * 2, "late"),
        ([replace(_RIGHT, elapsed_s=2.1, stalled_s=0.2), _RIGHT], ""),
        ([replace(_RIGHT, elapsed_s=2.1), replace(_RIGHT, stalled_s=0.2)], ""),
        ([replace(_RIGHT, elapsed_s=2.5, stalled_s=0.2), _RIGHT], "late"),
        ([replace(_RIGHT, after="no")] * 2, "group broken"),
    ],
)
def test_what_counts_as_ended_well(ends: list[Ended], kind: str) -> None:
    problem = judge([Reply(value=end) for end in ends], within_s=2.0)
    assert problem.partition(":")[0] == kind
