"""What a rank of `check` does: one order after the other, a cell or a mistake, at some place.

HERE compares calls where this group does so by itself, WIRE over TCP as across hosts, BLIND without
the places of calls, which is a canary. RAW is torch.distributed without this package.

    result = answer(Order(what="op differs", place=WIRE))      # collective
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm_collectives.call.agreement import AgreementPolicy
from comm_collectives.call.groups import group_state
from comm_collectives.checking.cells import (
    MOE_COLLECTIVES,
    TORCH_ORDER,
    Case,
    run_moe,
    run_ours,
    run_torch_order,
)
from comm_collectives.checking.misuse import MISUSE_OF, At, run_misuse, run_raw_misuse
from comm_collectives.checking.results import CaseResult, run_case
from comm_collectives.collectives import all_reduce, drop_in

HERE, WIRE, BLIND, RAW_TORCH = "here", "over the wire", "blind", "torch.distributed"


@dataclass(frozen=True, slots=True)
class Order:
    """A cell, or the name of a mistake, and where to compare the calls of the ranks."""

    what: Case | str
    place: str = HERE


def answer(order: Order) -> CaseResult:
    """Do what is asked, in the default group. Collective."""
    what = order.what
    at = At(dist.get_rank(), dist.get_world_size())
    if order.place == RAW_TORCH:
        if isinstance(what, Case):
            return run_case(lambda: run_torch_order(what, dist))
        return run_raw_misuse(MISUSE_OF[what], at)
    _meet_at(order.place)
    if not isinstance(what, Case):
        return run_misuse(MISUSE_OF[what], at)
    if what.collective in MOE_COLLECTIVES:
        return run_case(lambda: run_moe(what))
    if what.collective.startswith(TORCH_ORDER):
        return run_case(lambda: run_torch_order(what, drop_in))
    return run_case(lambda: run_ours(what))


def _meet_at(place: str) -> None:
    """Let the default group compare its calls there from now on."""
    state = group_state(None)
    if place == BLIND:
        state.policy = AgreementPolicy(call_sites=False)
    elif state.may_share_memory is not (place == HERE) or state.policy != AgreementPolicy():
        state.policy, state.frames = AgreementPolicy(), None
        state.may_share_memory = place == HERE
        # The group finds out where it meets in its first call.
        all_reduce(torch.zeros(1))
