"""Where the calls of a group travel, found out in its first call.

Over TCP at first; over shared memory if all ranks prove over TCP that they have some in common.

    frames = open_frames(state, call)
"""

from collections.abc import Callable

from comm_collectives.base.streams import ShmStreams, SocketStreams
from comm_collectives.call.frames import NO_SIGNATURE, Cargo, Frames, Waiter
from comm_collectives.call.groups import GroupState


def open_frames(state: GroupState, call: Waiter) -> Frames:
    """Return the frames of a group for a call. Collective in the first, and until that succeeds.

    Raises:
        CommError: not all ranks came.
    """
    if state.frames is None:
        state.openings += 1
        key = f"{state.name}/calls/{state.openings}"
        # A rank that ended before its first call left no stream that could break.
        has_lost = state.transport.has_lost if state.backend_of.get("cpu") == "gloo" else None
        streams = SocketStreams(
            rank=state.rank, size=state.size, store=state.store(), key=key, has_lost=has_lost
        )
        state.frames, state.asks_for_memory = Frames(streams, state.transport.clock), True
    if state.asks_for_memory and state.may_share_memory:
        _share_memory(state, state.frames, call)
    state.asks_for_memory = False
    return state.frames


def _share_memory(state: GroupState, frames: Frames, call: Waiter) -> None:
    """Go over to shared memory, if all ranks have some in common."""
    try:
        shared = ShmStreams.open(state.rank, state.size, _all_gather(state, frames, call))
    except BaseException as error:
        frames.fail(call.number, type(error).__name__, str(error))
        raise
    if shared is not None:
        state.frames = Frames(shared, state.transport.clock)
        state.frames.settle(frames.settled)
        frames.streams.close()


def _all_gather(state: GroupState, frames: Frames, call: Waiter) -> Callable[[bytes], list[bytes]]:
    """Return what hands a text of each rank to all; steps of the call before its first one."""
    steps = iter(range(-1, -1000, -1))

    def all_gather(text: bytes) -> list[bytes]:
        cargo = Cargo(parts=[text] * state.size)
        theirs = frames.offer(NO_SIGNATURE, step=next(steps), cargo=cargo, waiter=call)
        frames.receive(None, call)
        return [text if r == state.rank else theirs[r].part for r in range(state.size)]

    return all_gather
