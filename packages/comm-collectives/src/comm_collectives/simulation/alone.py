"""One rank of a group without the others, to learn what its program allocates.

    stand_alone(ep_group)
    dispatch(x, topk_idx, topk_weights, num_experts=64, group=ep_group)   # x may be a fake tensor

Invariant: a call moves and allocates on this rank what it would beside ranks that are as it is, and
waits for nobody.
"""

from comm_collectives.call.groups import Group, group_state


def stand_alone(group: Group | None = None) -> None:
    """Have the calls of this group answered here from now on. Not collective.

    Each of the other ranks, which need not exist, tells and sends this rank what it has for itself:
    with tokens that choose experts evenly, what a rank with as many tokens would. Where this rank
    says how many rows it expects, so many come. Shapes and memory are then those of such a group;
    sums mean nothing. On the host only; what `send`, `recv` and `isend_tensors` move is not
    answered.

    Args:
        group: of torch, of any backend; None is the default group.
    """
    group_state(group).is_alone = True
