"""Which ranks share experts: the experts' own axes, folded over the ranks of attention's axes.

Attention divides ranks into dp x tp (x cp), the experts of an MoE layer divide the same ranks into
expert-dp x ep x etp, with no relation between the two but the set of ranks. Pure arithmetic, the
same on every rank; making the process groups is up to the caller.

    axes = fold_experts(range(8), ep_size=2, etp_size=2)
    axes.ep        # ((0, 2), (1, 3), (4, 6), (5, 7)): each spreads all experts over its ranks
    axes.etp       # ((0, 1), (2, 3), (4, 5), (6, 7)): each spreads the slices of its experts
    axes.expert_dp # ((0, 4), (1, 5), (2, 6), (3, 7)): hold the same; sum their experts' gradients
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_pipeline._checks import check_count
from moe_pipeline.errors import MoEValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAxes:
    """The groups of ranks along each axis; every rank is in one group of each.

    Attributes:
        ep: for `MoEGroups.ep`.
        etp: for `MoEGroups.etp`.
        expert_dp: ranks that hold the same slices of the same experts: the gradients of
            `MoELayer.experts` are to be summed over them, those of all other parameters of the
            layer over `MoEGroups.tokens`.
    """

    ep: tuple[tuple[int, ...], ...]
    etp: tuple[tuple[int, ...], ...]
    expert_dp: tuple[tuple[int, ...], ...]


def fold_experts(ranks: Sequence[int], *, ep_size: int = 1, etp_size: int = 1) -> ExpertAxes:
    """Lay expert-dp x ep x etp over ranks; neighbours are in one etp group. Not collective.

    Args:
        ranks: all ranks of one pipeline stage, in the order in which axes are to be laid; within a
            group of ep or etp they must ascend, since torch numbers the ranks of a group so.
        ep_size: ranks over which the experts are split.
        etp_size: ranks over which each expert is split.

    Raises:
        ValueError: the sizes do not divide the number of ranks, a rank comes twice, or the order
            is one that process groups cannot have.
    """
    check_count("ep_size", ep_size)
    check_count("etp_size", etp_size)
    if len(set(ranks)) != len(ranks):
        raise MoEValueError(f"ranks={list(ranks)} holds a rank twice; give each once")
    block = ep_size * etp_size
    if len(ranks) % block:
        raise MoEValueError(
            f"ep_size={ep_size} x etp_size={etp_size} = {block} does not divide the "
            f"{len(ranks)} ranks; choose sizes whose product does"
        )
    blocks = [tuple(ranks[first : first + block]) for first in range(0, len(ranks), block)]
    axes = ExpertAxes(
        ep=tuple(each[place::etp_size] for each in blocks for place in range(etp_size)),
        etp=tuple(
            each[place * etp_size : (place + 1) * etp_size]
            for each in blocks
            for place in range(ep_size)
        ),
        expert_dp=tuple(zip(*blocks, strict=True)),
    )
    for name, groups in (("ep", axes.ep), ("etp", axes.etp)):
        for group in groups:
            if list(group) != sorted(group):
                raise MoEValueError(
                    f"ranks={list(ranks)} lays the {name} group {list(group)}, but torch numbers "
                    "the ranks of a process group in ascending order, so its ranks would hold "
                    "other slices than the axes say; order the ranks so that each group ascends"
                )
    return axes
