"""What this rank knows of a process group: its place in it, its device, and its call numbers.

Call numbers count this package's calls in one group. Ranks run the same program, so the numbers
agree, and an error can say `all_to_all call 7` and mean the same call on every rank. Transfers
between two ranks are counted per direction, because pipeline stages make different numbers of them.

    state = group_state(None)
    state.rank, state.size, state.next_call()
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_backend_config

from comm_collectives.scratch import ScratchPool


@final
class GroupState:
    """A process group as this rank sees it. `rank` is inside the group, `ranks` are global."""

    __slots__ = ("_calls", "_transfers", "backend_of", "name", "rank", "ranks", "scratch", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.name: str = group.group_name
        self.backend_of: dict[str, str] = _parse_backends(get_backend_config(group))
        self.scratch = ScratchPool()
        self._calls: Iterator[int] = itertools.count(1)
        self._transfers: dict[tuple[int, int], Iterator[int]] = defaultdict(
            lambda: itertools.count(1)
        )

    def next_call(self) -> int:
        """Number of the collective that starts now (from 1)."""
        return next(self._calls)

    def next_transfer(self, src: int, dst: int) -> int:
        """Number of the transfer from `src` to `dst` (ranks inside the group) that starts now."""
        return next(self._transfers[src, dst])

    @property
    def global_rank(self) -> int:
        """This rank's number in the default group."""
        return self.ranks[self.rank]

    def transport_type(self, device: torch.device) -> str:
        """Device type on which the bytes of a tensor on `device` travel: the same on every rank.

        Gloo copies CUDA tensors through the host in any case, so they are staged there; a tensor
        whose device has no backend travels on the device that has one.
        """
        if device.type in self.backend_of and self.backend_of[device.type] != "gloo":
            return device.type
        return self.control_type

    @property
    def control_type(self) -> str:
        """Device type for small control messages: the host if the group can, else its device."""
        return "cpu" if "cpu" in self.backend_of else next(iter(self.backend_of))


# Call numbers belong to a group, and a group has no slot of its own for them.
_STATES: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default group for None.

    Raises:
        ValueError: there is no default group, or this rank is not a member.
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group=None means the default process group, but there is none; "
                "call torch.distributed.init_process_group first or pass group="
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group={group!r} is not a ProcessGroup of which this rank is a member; "
            "call only on the ranks that new_group was given"
        )
    return group


def group_state(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, GroupState]:
    """Resolve `group` and return it with what is known of it."""
    resolved = resolve_group(group)
    state = _STATES.get(resolved)
    if state is None:
        state = _STATES[resolved] = GroupState(resolved)
    return resolved, state


def check_peer(state: GroupState, peer: int, name: str) -> None:
    """Check that `peer` is another rank of the group.

    Raises:
        ValueError: `peer` is outside the group or is this rank.
    """
    if not 0 <= peer < state.size:
        raise ValueError(
            f"{name}={peer} is not a rank of a group of {state.size}; give 0..{state.size - 1}"
        )
    if peer == state.rank:
        raise ValueError(f"{name}={peer} is this rank itself; hand the tensors over directly")


def check_timeout(timeout_s: float | None) -> None:
    """Check a time limit in seconds.

    Raises:
        ValueError: it is not positive.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be positive, or None for the group's own")


def _parse_backends(config: str) -> dict[str, str]:
    pairs = (item.split(":") for item in config.split(","))
    return {device: backend for device, backend in pairs}
