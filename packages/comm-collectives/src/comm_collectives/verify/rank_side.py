"""What a rank of `check` does: one order after the other, a cell or a mistake, at some place.

BOARD compares calls where this group does so by itself, WIRE over the group's own transport as
across hosts, BLIND not at all, which is a canary. RAW is torch.distributed without this package.

    result = answer(Order(what="op differs", place=WIRE))      # collective
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm_collectives.call.agreement.agreement import AgreementPolicy
from comm_collectives.call.control.meeting import BoardMeeting, WireMeeting
from comm_collectives.call.groups.groups import group_state
from comm_collectives.collectives.drop_in import torch_order
from comm_collectives.collectives.reduction import all_reduce
from comm_collectives.verify.cells.cases import TORCH_ORDER, CaseResult, run_case
from comm_collectives.verify.cells.moe_cells import MOE_COLLECTIVES, run_moe
from comm_collectives.verify.cells.ours import run_ours
from comm_collectives.verify.cells.problems import Case
from comm_collectives.verify.cells.torch_order import run_torch_order
from comm_collectives.verify.misuse.absences import ABSENCES, OTHERS
from comm_collectives.verify.misuse.disagreements import DISAGREEMENTS
from comm_collectives.verify.misuse.moe import MOE_MISUSES
from comm_collectives.verify.misuse.outcome import At, Misuse, run_misuse, run_raw_misuse
from comm_collectives.verify.misuse.raw import RAW, RAW_ONLY
from comm_collectives.verify.misuse.refusals import REFUSALS
from comm_collectives.verify.misuse.torch_order import TORCH_ORDER_MISUSES

BOARD, WIRE, BLIND, RAW_TORCH = "here", "over the wire", "blind", "torch.distributed"
MISUSES = (
    *(*DISAGREEMENTS, *REFUSALS, *TORCH_ORDER_MISUSES),
    *(*MOE_MISUSES, *OTHERS, *ABSENCES),
)
MISUSE_OF: dict[str, Misuse] = {misuse.name: misuse for misuse in (*MISUSES, *RAW_ONLY)}


@dataclass(frozen=True, slots=True)
class Order:
    """A cell, or the name of a mistake, and where to compare the calls of the ranks."""

    what: Case | str
    place: str = BOARD


def answer(order: Order) -> CaseResult:
    """Do what is asked, in the default group. Collective."""
    what = order.what
    at = At(dist.get_rank(), dist.get_world_size())
    if order.place == RAW_TORCH:
        if isinstance(what, Case):
            return run_case(lambda: run_torch_order(what, dist))
        return run_raw_misuse(RAW[what], MISUSE_OF[what], at)
    _meet_at(order.place)
    if not isinstance(what, Case):
        return run_misuse(MISUSE_OF[what], at)
    if what.collective in MOE_COLLECTIVES:
        return run_case(lambda: run_moe(what))
    if what.collective.startswith(TORCH_ORDER):
        return run_case(lambda: run_torch_order(what, torch_order))
    return run_case(lambda: run_ours(what))


def _meet_at(place: str) -> None:
    """Let the default group compare its calls there from now on."""
    state = group_state(None)
    if place == BLIND:
        state.policy = AgreementPolicy(every=0)
    elif place == WIRE and not isinstance(state.meeting, WireMeeting):
        state.policy = AgreementPolicy(every=1)
        state.meeting = WireMeeting(state.transport, state.size, state.control_type)
    elif place == BOARD and not isinstance(state.meeting, BoardMeeting):
        state.policy, state.meeting = AgreementPolicy(), None
        # The group finds out where it meets in its first call.
        all_reduce(torch.zeros(1))
