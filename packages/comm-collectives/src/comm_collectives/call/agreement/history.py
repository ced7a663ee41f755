"""The calls that ranks have not compared yet, as one rolling hash and the last few in full.

Calls whose data a device's backend moves are compared now and then. The hash of all calls so far
then shows that an earlier one differed, and the list which.

    history.add(7, head)
    history.rolling              # goes into the next frame that is compared
"""

import struct
from collections import deque
from collections.abc import Callable
from typing import final

from comm_collectives.call.signature import CallSignature

_KEPT_CALLS = 64
_ENTRY = struct.Struct("<2q")


@final
class History:
    """The rolling hash of a group's calls on this rank, and the last 64 of them.

    `compares_next` says that the next call is compared, on every rank, whatever its number: as the
    first is, in which a device's backend finds its peers and would wait for them in silence.
    """

    def __init__(self) -> None:
        self.rolling = 0
        self.compares_next = True
        self._last: deque[tuple[int, int, CallSignature]] = deque(maxlen=_KEPT_CALLS)

    def add(self, number: int, head: CallSignature) -> None:
        """Note a call."""
        self.rolling = head.fingerprint(self.rolling)
        self._last.append((number, self.rolling, head))

    def clear(self) -> None:
        """Start anew after ranks compared their calls, all of them at the same call."""
        self.rolling = 0
        self.compares_next = False
        self._last.clear()

    def first_difference(self, tell: Callable[[bytes], list[bytes]], current: str) -> str:
        """Describe this rank's version of the first call that differs. Collective through `tell`.

        `tell` gives every rank's bytes to every rank; `current` describes the call just made.
        """
        told = tell(b"".join(_ENTRY.pack(number, rolling) for number, rolling, _ in self._last))
        views = [dict(_ENTRY.iter_unpack(text)) for text in told]
        known = set(views[0]).intersection(*views[1:])
        for number in sorted(known):
            if len({view[number] for view in views}) > 1:
                for own_number, _, head in self._last:
                    if own_number == number:
                        return f"call {number} was {head.describe()}"
        return f"a call before the last {_KEPT_CALLS} (found in {current})"
