"""Mistakes that are more than one call with other arguments: gradients, handles, threads, memory.

PROGRAMS[0].run(At(rank=1, size=2))      # what `error` and `raised_by` say
"""

import ctypes
import warnings
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.call.handles import debug_mode
from comm_collectives.call.signature import call_site
from comm_collectives.checking.cells import as_group
from comm_collectives.checking.misuse.outcome import (
    REFUSAL,
    TYPE_REFUSAL,
    At,
    Misuse,
    nobody,
    the_first,
    the_odd_one,
)
from comm_collectives.checking.misuse.steps import HIDDEN, dispatch_given, rows
from comm_collectives.collectives import all_reduce, all_to_all, broadcast, drop_in
from comm_collectives.moe import MoeOptions, combine, dispatch
from comm_collectives.p2p import isend_tensors, recv


def _two_threads(at: At) -> None:
    errors: list[RuntimeError] = []

    def run(name: str) -> None:
        try:
            with call_site(name):
                all_reduce(at.x)
        except RuntimeError as error:
            errors.append(error)

    for name in at.pick(("scale", "bias"), ("bias", "scale")):
        thread = Thread(target=run, args=(name,))
        thread.start()
        thread.join()
    if errors:
        raise errors[0]


def _changes_input(at: At) -> None:
    x = at.x
    handle = all_reduce(x, async_op=True)
    if at.odd:
        x.add_(1)
    handle.wait()


def _changes_behind_torch(at: At) -> None:
    x = at.x
    with debug_mode():
        handle = all_reduce(x, async_op=True)
    if at.odd:
        ctypes.c_float.from_address(x.data_ptr()).value = 7.0
    handle.wait()


def _calls_as_outsider(at: At) -> str:
    inner: Any = dist.new_group(list(range(at.size - 1)))  # for an outsider it is a number
    total = all_reduce(torch.ones(2), group=inner)
    return "" if total.tolist() == [at.size - 1.0] * 2 else f"the members got {total.tolist()}"


def _gradient(y: torch.Tensor, x: torch.Tensor, wanted: list[float]) -> str:
    (grad,) = torch.autograd.grad(y.sum(), x)
    return "" if grad.tolist() == wanted else f"the gradient is {grad.tolist()}, not {wanted}"


def _unused_output(at: At) -> str:
    """The odd one never uses what it got, and drops it; the gradients of the others still count."""
    x = torch.ones(at.size, requires_grad=True)
    y = all_to_all(x)
    return "" if at.odd else _gradient(y, x, [1.0] * (at.size - 1) + [0.0])


def _only_one_wants_gradient(at: At) -> str:
    """The others have no gradient of their own and drop what they got."""
    x = torch.ones(2, requires_grad=at.odd)
    y = all_reduce(x)
    return _gradient(y, x, [1.0, 1.0]) if at.odd else ""


def _no_grad_on_one(at: At) -> str:
    """The odd one records nothing, as in an evaluation; its loss counts for nothing."""
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(not at.odd):
        y = all_reduce(x)
    problem = "" if at.odd else _gradient(y, x, [at.size - 1.0] * 2)
    all_reduce(at.x)
    return problem


def _list_for_one(at: At) -> None:
    if at.odd:
        isend_tensors([at.x, at.x], dst=0).wait()
    elif at.rank == 0:
        recv(src=at.size - 1)


def _sends_to_itself(at: At) -> None:
    if at.odd:
        isend_tensors([at.x], dst=at.rank)


def _everything_to_first(at: At) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    expected = [50 if at.rank == 0 else 0] * at.size
    return rows(), torch.ones(sum(expected), 2), [50] + [0] * (at.size - 1), expected


def _all_swap_exchange(at: At) -> None:
    """The tensors are swapped, the splits are not."""
    x, output, sent, expected = _everything_to_first(at)
    drop_in.all_to_all_single(x, output, expected, sent)


def _one_swaps_exchange(at: At) -> None:
    """The odd rank swaps the splits too, so that nothing is wrong with its arguments alone."""
    x, output, sent, expected = _everything_to_first(at)
    arguments = at.pick((x, output, sent, expected), (output, x, expected, sent))
    drop_in.all_to_all_single(*arguments)


def _swapped_with_gradient(at: At) -> None:
    drop_in.all_to_all_single(rows(at.size).requires_grad_(), rows(at.size))


def _quantised(at: At) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop these dtypes one day
        x = torch.quantize_per_tensor(at.x, 0.5, 0, torch.qint8) if at.odd else at.x
    broadcast(x, src=0)


def _reuses(at: At) -> None:
    handle = dispatch_given(at, {}).handle
    dispatch_given(at, {"options": MoeOptions(reuse=handle) if at.odd else MoeOptions()})


def _reuses_other_choices(at: At) -> None:
    handle = dispatch_given(at, {}).handle
    dispatch_given(at, {"choice": at.pick(1, 0), "options": MoeOptions(reuse=handle)})


def _combines_other_dispatch(at: At) -> None:
    """Two dispatches whose rows are as many but lie in another order."""
    group, tokens = as_group(None), 2 * at.size
    x, weights = torch.ones(tokens, HIDDEN), torch.ones(tokens, 1)
    upwards = torch.arange(tokens).unsqueeze(1)
    first = dispatch(x, upwards, weights, num_experts=tokens, group=group)
    second = dispatch(x, upwards.flip(0), weights, num_experts=tokens, group=group)
    combine(first.x, at.pick(second, first).handle)


def _mine(name: str, run: Callable[[At], Any], error: str, *says: str) -> Misuse:
    """A mistake of which only the rank hears that made it."""
    return Misuse(name=name, run=run, error=error, says=says, raised_by=the_odd_one)


def _harmless(name: str, run: Callable[[At], Any]) -> Misuse:
    return Misuse(name=name, run=run, raised_by=nobody)


PROGRAMS = (
    Misuse(name="other order, by threads", run=_two_threads, says=("at scale", "{odd}: "), sides=0),
    _mine("input changed before wait", _changes_input, "MutatedInputError", "input 0"),
    _mine("input changed behind torch", _changes_behind_torch, "MutatedInputError", "input 0"),
    _mine("caller outside the group", _calls_as_outsider, "CommValueError", "member"),
    _mine("sender sends to itself", _sends_to_itself, "CommValueError", "dst="),
    _harmless("output unused in backward on one rank", _unused_output),
    _harmless("no gradients recorded on one rank", _no_grad_on_one),
    _harmless("gradient on one rank only", _only_one_wants_gradient),
    Misuse(
        name="a list of tensors where one is expected",
        run=_list_for_one,
        says=("recv", "2 tensors", "{odd}"),
        raised_by=the_first,
        sides=0,
    ),
    Misuse(
        name="quantised tensor on one rank", run=_quantised, error=TYPE_REFUSAL, says=("{odd}: ",)
    ),
    Misuse(
        name="torch order: all ranks swap input and output of all_to_all_single",
        run=_all_swap_exchange,
        error=REFUSAL,
        says=("the other way round", "rank 0: "),
    ),
    Misuse(
        name="torch order: one rank swaps input and output of all_to_all_single",
        run=_one_swaps_exchange,
        sides=1,
        says=("all fit if", "{odd} gave input", "output's place"),
    ),
    Misuse(
        name="torch order: swapped tensors of one size, one needs a gradient",
        run=_swapped_with_gradient,
        error=REFUSAL,
        says=("as if they were swapped",),
    ),
    Misuse(name="dispatch: one rank reuses a handle", run=_reuses, says=("reuse", "{odd}: ")),
    Misuse(
        name="dispatch: a handle reused for other choices on one rank",
        run=_reuses_other_choices,
        error=REFUSAL,
        says=("reuse", "{odd}: "),
    ),
    Misuse(
        name="combine: handle of another dispatch on one rank",
        run=_combines_other_dispatch,
        says=("dispatch", "{odd}: "),
    ),
)
