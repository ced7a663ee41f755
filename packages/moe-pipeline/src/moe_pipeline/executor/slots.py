"""What both ends of a transfer expect of it, so that its receive is posted before it is announced.

What brought the same tensors in the last two steps is expected to bring them again: its receive is
a slot of their shapes, which the receiver queues where the schedule lists it, and waits for nobody.
The message that announces the tensors is read later, before the computation that needs them. Where
they are others, the slot is filled with anything, as the order of transfers wants, and the tensors
come with the message, over the host. Nothing is expected of such a transfer until two steps have
been alike again; until then its receiver waits for the message, and then posts.

Invariant: both ends have the same slots in every step, since both have seen the same messages in
the steps before, and slots change between steps only.

    slots.begin()
    slots.of(receive)                 # shapes, or None: wait for the message
    slots.saw(receive, announced)     # once a step, at both ends
"""

from typing import final

from moe_pipeline.executor.stage_message import Announced
from moe_pipeline.schedules.table import Action

_Tensors = tuple[Announced, ...]


@final
class Slots:
    """Those of one rank's transfers, each under its receive."""

    def __init__(self) -> None:
        self._slots: dict[Action, _Tensors] = {}
        self._before: dict[Action, _Tensors] = {}
        self._seen: dict[Action, _Tensors] = {}

    def begin(self) -> None:
        """Start a step."""
        self._slots = {a: seen for a, seen in self._seen.items() if self._before.get(a) == seen}
        self._before, self._seen = self._seen, {}

    def of(self, receive: Action) -> _Tensors | None:
        """What to expect in this step; None: nothing is known."""
        return self._slots.get(receive)

    def saw(self, receive: Action, announced: _Tensors) -> None:
        """Take note of what a transfer brings in this step."""
        self._seen[receive] = announced
