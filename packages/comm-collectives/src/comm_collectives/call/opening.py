"""Where the calls of a group travel, found out in its first call.

Over TCP at first; over shared memory if all ranks prove over TCP that they have some in common.

    frames = open_frames(state, call)
"""

from collections.abc import Callable

from comm_collectives.base.streams import ShmStreams
from comm_collectives.call.frames import NO_SIGNATURE, Cargo, Frames, Waiter
from comm_collectives.call.groups import GroupState
from comm_collectives.errors import CommError


def open_frames(state: GroupState, call: Waiter) -> Frames:
    """Return the frames of a group for a call. Collective in the first, and until that succeeds.

    Raises:
        CommError: not all ranks came.
    """
    frames = state.reach()
    if state.asks_for_memory and state.may_share_memory:
        frames = _share_memory(state, frames, call)
    state.asks_for_memory = False
    return frames


def _share_memory(state: GroupState, frames: Frames, call: Waiter) -> Frames:
    """Go over to shared memory, if all ranks have some in common."""
    try:
        shared = ShmStreams.open(state.rank, state.size, _all_gather(state, frames, call))
    except BaseException as error:
        frames.fail(call.number, type(error).__name__, str(error))
        if not isinstance(error, CommError):
            state.failed_calls.append(call.number)  # as those do who are told
        raise
    if shared is None:
        return frames
    state.frames = Frames(shared, state.transport.clock)
    state.frames.settle(frames.settled)
    frames.streams.close()
    return state.frames


def _all_gather(state: GroupState, frames: Frames, call: Waiter) -> Callable[[bytes], list[bytes]]:
    """Return what hands a text of each rank to all; steps of the call before its first one."""
    steps = iter(range(-1, -1000, -1))

    def all_gather(text: bytes) -> list[bytes]:
        cargo = Cargo(parts=[text] * state.size)
        theirs = frames.offer(NO_SIGNATURE, step=next(steps), cargo=cargo, waiter=call)
        frames.receive(None, call)
        return [text if r == state.rank else theirs[r].part for r in range(state.size)]

    return all_gather
