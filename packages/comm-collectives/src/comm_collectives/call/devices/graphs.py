"""Calls inside a CUDA graph that is being captured: recognised, and only what can be replayed.

A replay runs no line of Python: nothing is compared, counted or named. So calls whose shapes are
known are captured without their comparison, and those that need the host are refused by name.

    refuse_captured("broadcast")
"""

import torch

from comm_collectives.errors import CommValueError

_WHY = "its ranks tell each other over the host what they send, which a replay does not do"
_REMEDY = "call it outside of the graph, or tell it all sizes (output_splits of an all_to_all)"


def is_captured() -> bool:
    """Whether the current stream of this thread is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_captured(name: str, why: str = _WHY, remedy: str = _REMEDY) -> None:
    """Raise for a call that cannot be in a graph, if one is being captured.

    Raises:
        CommValueError: names the call, why, and what to change.
    """
    if is_captured():
        raise CommValueError(f"{name} cannot be captured in a CUDA graph: {why}; {remedy}")
