"""Transfers that a program gives its device itself, looked after as those of this package are.

works = launch_transfers(
    lambda: [dist.isend(x, group=group, group_dst=1)], "send to", 1, group
)
works[0].wait()      # raises who is dead or did not come, if the device waits in vain
"""

from operator import index

from comm_collectives.base.transport import Pending as Pending
from comm_collectives.call.devices import Start
from comm_collectives.call.devices import launch_transfers as launch_of_state
from comm_collectives.call.groups import Group, check_peer, group_state


def launch_transfers(start: Start, what: str, peer: int, group: Group | None) -> list[Pending]:
    """Start transfers of torch between two ranks' devices, and look after them to their end.

    If the peer is gone, or does not do its part by the group's limit, the device's part of the
    group is aborted, and `wait` and every later call of the group raise an error that names the
    peer. Not collective.

    Args:
        start: starts them, and returns torch's works; None among them is left out.
        what: for errors: "send to", "recv from", "swap with".
        peer: the other rank, inside the group.
        group: None is the default group.

    Returns:
        The works, whose `wait` also raises that error.

    Raises:
        ValueError, TypeError: `peer` is not another rank of the group; nothing is started.
        CommError: what was found wrong with the group's device before.
    """
    state = group_state(group)
    check_peer(state, peer, "peer")
    return launch_of_state(state, what, index(peer), start)
