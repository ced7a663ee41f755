"""Ranks that make different calls, on purpose. Each line is that of a user's program.

DISAGREEMENTS[0].run(At(rank=1, size=2))      # a MismatchError on every rank
"""

from collections.abc import Callable
from threading import Thread

from comm_collectives.checking.misuse.outcome import At, Misuse
from comm_collectives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from comm_collectives.nested import broadcast_nested


def _two_lines(at: At) -> None:
    bias, scale = at.x, at.x
    if at.odd:
        all_reduce(scale)
        all_reduce(bias)
    else:
        all_reduce(bias)
        all_reduce(scale)


def _two_threads(at: At) -> None:
    bias, scale = at.x, at.x
    jobs = [  # on two lines, which are two call sites
        lambda: all_reduce(bias),
        lambda: all_reduce(scale),
    ]
    errors: list[RuntimeError] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except RuntimeError as error:
            errors.append(error)

    for job in reversed(jobs) if at.odd else jobs:
        thread = Thread(target=run, args=(job,))
        thread.start()
        thread.join()
    if errors:
        raise errors[0]


def _skips_a_call(at: At) -> None:
    if not at.odd:
        all_reduce(at.x)
    all_reduce(at.x)


def _two_operations(at: At) -> None:
    if at.odd:
        all_to_all(at.x, input_splits=at.splits)
    else:
        all_reduce(at.x)


def _broadcast_and_exchange(at: At) -> None:
    if at.odd:
        all_to_all(at.x, input_splits=at.splits)
    else:
        broadcast(at.x, src=0)


def _broadcast_and_reduce(at: At) -> None:
    if at.odd:
        broadcast_nested(None, src=0)
    else:
        all_reduce(at.x)


def _gather_and_scatter(at: At) -> None:
    if at.odd:
        scatter(None, src=0)
    else:
        gather(at.x, dst=0)


def _two_async_operations(at: At) -> None:
    first = all_reduce(at.x, op="max" if at.odd else "sum", async_op=True)
    first.wait()


def _splits_disagree(at: At) -> None:
    expected = [3000 if at.rank == 0 else 0] * at.size
    if at.odd:
        expected[0] += 1
    all_to_all(at.x, input_splits=at.splits, output_splits=expected)


def _splits_on_one_rank(at: At) -> None:
    expected = [3000 if at.rank == 0 else 0] * at.size
    all_to_all(at.x, input_splits=at.splits, output_splits=expected if at.odd else None)


def _async_out_of_order(at: At) -> None:
    first, second = at.x, at.x
    if at.odd:
        total = all_gather(second, async_op=True)
        all_reduce(first)
    else:
        total = all_reduce(first, async_op=True)
        all_gather(second)
    total.wait()


DISAGREEMENTS = (
    Misuse(
        name="dtype differs, same bytes",
        run=lambda at: all_reduce(at.x.int() if at.odd else at.x),
        says=("dtype", "float32", "int32", "{odd}: "),
    ),
    Misuse(
        name="dtype differs, other bytes",
        run=lambda at: all_reduce(at.x.half() if at.odd else at.x),
        says=("dtype", "float32", "float16", "{odd}: "),
    ),
    Misuse(
        name="dtype differs, one number",
        run=lambda at: all_reduce(at.x[:1].int() if at.odd else at.x[:1]),
        says=("dtype", "{odd}: "),
    ),
    Misuse(
        name="dtype differs in all_to_all",
        run=lambda at: all_to_all(at.x.int() if at.odd else at.x, input_splits=at.splits),
        says=("dtype", "{odd}: "),
    ),
    Misuse(
        name="dtype differs in all_gather",
        run=lambda at: all_gather(at.x.int() if at.odd else at.x),
        says=("dtype", "{odd}: "),
    ),
    Misuse(
        name="dtype differs in gather",
        run=lambda at: gather(at.x.int() if at.odd else at.x, dst=0),
        says=("dtype", "{odd}: "),
    ),
    Misuse(
        name="op differs",
        run=lambda at: all_reduce(at.x, op="max" if at.odd else "sum"),
        says=("op", "op=max", "op=sum", "{odd}: "),
    ),
    Misuse(
        name="op differs in reduce_scatter",
        run=lambda at: reduce_scatter(at.x, splits=at.splits, op="max" if at.odd else "sum"),
        says=("op", "op=max", "op=sum", "{odd}: "),
    ),
    Misuse(
        name="op differs in asynchronous calls",
        run=_two_async_operations,
        says=("op", "op=max", "op=sum", "{odd}: "),
    ),
    Misuse(
        name="lengths differ",
        run=lambda at: all_reduce(at.x[: 3000 - at.odd]),
        says=("shape", "(2999,)", "(3000,)", "{odd}: "),
    ),
    Misuse(
        name="shapes differ, same length",
        run=lambda at: all_reduce(at.x.view(2, -1) if at.odd else at.x),
        says=("shape", "(2, 1500)", "{odd}: "),
    ),
    Misuse(
        name="row shapes differ in all_gather",
        run=lambda at: all_gather(at.x.view(-1, 2 if at.odd else 1)),
        says=("row shape", "{odd}: "),
    ),
    Misuse(
        name="row widths differ in all_to_all",
        run=lambda at: (
            all_to_all(at.x[:3000].view(-1, 1 + at.odd), input_splits=None)
            if at.size == 2
            else all_to_all(at.x[: 100 * at.size].view(at.size, -1)[:, : 99 + at.odd])
        ),
        says=("row shape", "{odd}: "),
    ),
    Misuse(
        name="splits differ in reduce_scatter",
        run=lambda at: reduce_scatter(
            at.x, splits=at.splits[::-1] if at.odd else at.splits, op="sum"
        ),
        says=("splits", "{odd}: "),
    ),
    Misuse(name="same shape, other order", run=_two_lines, says=("call site", "{odd}: ")),
    Misuse(
        name="same shape, other order, by threads",
        run=_two_threads,
        says=("call site", "{odd}: "),
    ),
    Misuse(name="one rank skips a call", run=_skips_a_call, says=("call site", "{odd}: ")),
    Misuse(
        name="asynchronous calls in another order",
        run=_async_out_of_order,
        says=("operation", "all_reduce(", "all_gather(", "{odd}: "),
    ),
    Misuse(
        name="all_reduce and all_to_all",
        run=_two_operations,
        says=("operation", "all_reduce(", "all_to_all(", "{odd}: "),
    ),
    Misuse(
        name="broadcast and all_to_all",
        run=_broadcast_and_exchange,
        says=("operation", "broadcast(", "all_to_all(", "{odd}: "),
    ),
    Misuse(
        name="all_reduce and broadcast_nested",
        run=_broadcast_and_reduce,
        says=("operation", "all_reduce(", "broadcast_nested(", "{odd}: "),
    ),
    Misuse(
        name="gather and scatter",
        run=_gather_and_scatter,
        says=("operation", "gather(", "scatter(", "{odd}: "),
    ),
    Misuse(
        name="source differs in broadcast",
        run=lambda at: broadcast(at.x, src=at.size - 1 if at.odd else 0),
        says=("src", "src=0", "{odd}: "),
    ),
    Misuse(
        name="source differs in broadcast_nested",
        run=lambda at: broadcast_nested({"x": at.x}, src=at.size - 1 if at.odd else 0),
        says=("src", "src=0", "{odd}: "),
    ),
    Misuse(
        name="destination differs in gather",
        run=lambda at: gather(at.x, dst=at.size - 1 if at.odd else 0),
        says=("dst", "dst=0", "{odd}: "),
    ),
    Misuse(
        name="source differs in scatter",
        run=lambda at: scatter([at.x] * at.size, src=at.size - 1 if at.odd else 0),
        says=("src", "src=0", "{odd}: "),
    ),
    Misuse(
        name="receiver of a broadcast is longer",
        run=lambda at: broadcast(at.x if at.odd else at.x[:2000], src=0),
        says=("2000", "3000", "{odd}"),
        sides=1,
    ),
    Misuse(
        name="receiver of a broadcast has another dtype",
        run=lambda at: broadcast(at.x.int() if at.odd else at.x, src=0),
        says=("float32", "int32", "{odd}"),
        sides=1,
    ),
    Misuse(
        name="splits disagree",
        run=_splits_disagree,
        says=("input_splits", "output_splits", "{odd}"),
        sides=1,
    ),
    Misuse(
        name="output_splits on one rank only",
        run=_splits_on_one_rank,
        says=("output_splits given", "{odd}: "),
    ),
)
