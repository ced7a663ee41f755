"""Ranks that are missing, dead or outside, inputs changed too soon, gradients that nobody asks for.

OTHERS[0].run(At(rank=1, size=2))      # what `error` and `raised_by` say
"""

import ctypes
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.call.handles import debug_mode
from comm_collectives.checking.misuse.outcome import (
    PEER_FAILED,
    TIMEOUT,
    At,
    Misuse,
    nobody,
    the_first,
    the_odd_one,
    the_others,
)
from comm_collectives.collectives import all_reduce, all_to_all, gather
from comm_collectives.p2p import isend_tensors, recv, recv_tensors

_LIMIT_S = 0.3
_ENQUIRY_S = 4.0  # after a limit has passed, for asking who was there


def _changes_input(at: At) -> None:
    x = at.x
    handle = all_reduce(x, async_op=True)
    if at.odd:
        x.add_(1)
    handle.wait()


def _calls_as_outsider(at: At) -> str:
    if at.size == 1:
        return ""
    inner = dist.new_group(list(range(at.size - 1)))
    group: Any = inner  # for an outsider it is a number
    total = all_reduce(torch.ones(2), group=group)
    return "" if total.tolist() == [at.size - 1.0] * 2 else f"the members got {total.tolist()}"


def _unused_output(at: At) -> str:
    """The odd one never uses what it got, and drops it; its gradient still counts."""
    x = torch.ones(at.size, requires_grad=True)
    y = all_to_all(x)
    if at.odd:
        del y
        grad = torch.tensor([1.0] * (at.size - 1) + [0.0])
    else:
        (grad,) = torch.autograd.grad(y.sum(), x)
    wanted = [1.0] * (at.size - 1) + [0.0]
    return "" if grad.tolist() == wanted else f"the gradient is {grad.tolist()}, not {wanted}"


def _only_one_wants_gradient(at: At) -> str:
    """The others have no gradient of their own and drop what they got."""
    x = torch.ones(2, requires_grad=at.odd)
    y = all_reduce(x)
    if not at.odd:
        return ""
    (grad,) = torch.autograd.grad(y.sum(), x)
    return "" if grad.tolist() == [1.0, 1.0] else f"the gradient is {grad.tolist()}"


def _no_grad_on_one(at: At) -> str:
    """The odd one records nothing, as in an evaluation; its loss counts for nothing."""
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(not at.odd):
        y = all_reduce(x)
    grad = torch.full((2,), at.size - 1.0)
    if not at.odd:
        (grad,) = torch.autograd.grad(y.sum(), x)
    all_reduce(at.x)
    wanted = [at.size - 1.0] * 2
    return "" if grad.tolist() == wanted else f"the gradient is {grad.tolist()}, not {wanted}"


def _changes_behind_torch(at: At) -> None:
    x = at.x
    with debug_mode():
        handle = all_reduce(x, async_op=True)
    if at.odd:
        memory = ctypes.c_float.from_address(x.data_ptr())
        memory.value = 7.0
    handle.wait()


def _dies(at: At) -> None:
    all_reduce(at.x)
    if at.odd:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(at.x)


def _receives_nothing(at: At) -> None:
    recv_tensors(src=at.size - 1, timeout_s=_LIMIT_S)


def _list_for_one(at: At) -> None:
    if at.odd:
        isend_tensors([at.x, at.x], dst=0).wait()
    elif at.rank == 0:
        recv(src=at.size - 1)


def _sends_to_itself(at: At) -> None:
    if at.odd:
        isend_tensors([at.x], dst=at.rank)


OTHERS = (
    Misuse(
        name="input changed before wait",
        run=_changes_input,
        error="MutatedInputError",
        says=("all_reduce", "input 0"),
        raised_by=the_odd_one,
    ),
    Misuse(
        name="caller outside the group",
        run=_calls_as_outsider,
        error="CommValueError",
        says=("member",),
        raised_by=the_odd_one,
    ),
    Misuse(
        name="a list of tensors where one is expected",
        run=_list_for_one,
        says=("recv", "2 tensors", "{odd}"),
        raised_by=the_first,
        sides=0,
    ),
    Misuse(
        name="sender sends to itself",
        run=_sends_to_itself,
        error="CommValueError",
        says=("dst=",),
        raised_by=the_odd_one,
    ),
    Misuse(
        name="input changed before wait, behind torch's back",
        run=_changes_behind_torch,
        error="MutatedInputError",
        says=("all_reduce", "input 0"),
        raised_by=the_odd_one,
    ),
    Misuse(name="output unused in backward on one rank", run=_unused_output, raised_by=nobody),
    Misuse(name="no gradients recorded on one rank", run=_no_grad_on_one, raised_by=nobody),
    Misuse(name="gradient on one rank only", run=_only_one_wants_gradient, raised_by=nobody),
)
ABSENCES = (
    Misuse(
        name="one rank never sends",
        run=lambda at: None if at.odd else _receives_nothing(at),
        error=TIMEOUT,
        says=("{odd}",),
        raised_by=the_others,
        within_s=_LIMIT_S + _ENQUIRY_S,
        goes_on=False,
    ),
    Misuse(
        name="one rank never comes to all_reduce",
        run=lambda at: None if at.odd else all_reduce(at.x, timeout_s=_LIMIT_S),
        error=TIMEOUT,
        says=("did not arrive: {odd}",),
        raised_by=the_others,
        within_s=_LIMIT_S + _ENQUIRY_S,
        goes_on=False,
    ),
    Misuse(
        name="one rank never comes to all_to_all",
        run=lambda at: (
            None if at.odd else all_to_all(at.x, input_splits=at.splits, timeout_s=_LIMIT_S)
        ),
        error=TIMEOUT,
        says=("did not arrive: {odd}",),
        raised_by=the_others,
        within_s=_LIMIT_S + _ENQUIRY_S,
        goes_on=False,
    ),
    Misuse(
        name="one rank never comes to gather",
        run=lambda at: None if at.odd else gather(at.x, dst=0, timeout_s=_LIMIT_S),
        error=TIMEOUT,
        says=("did not arrive: {odd}",),
        raised_by=the_others,
        within_s=_LIMIT_S + _ENQUIRY_S,
        goes_on=False,
    ),
    Misuse(
        name="one rank dies",
        run=_dies,
        error=PEER_FAILED,
        says=("{odd}",),
        raised_by=the_others,
        within_s=_ENQUIRY_S,
        goes_on=False,
        dies=True,
    ),
)
