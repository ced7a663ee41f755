"""What the hosts of a group tell each other of their devices, over streams of their own.

One line of JSON each. Nothing here waits but `pump`, and nothing fails: a rank that cannot be
reached says nothing.

    reports = Reports(streams)
    reports.tell({"queued": [7, 1]})
    for peer, said in reports.pump(0.25): ...
"""

import json
from collections import defaultdict
from contextlib import suppress
from typing import Any, final

from comm_collectives.base.streams import Streams
from comm_collectives.errors import CommError

_READ_BYTES = 1 << 16


@final
class Reports:
    """The reports of one rank of a group; one thread at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.peers = [rank for rank in range(streams.size) if rank != streams.rank]
        self._going: dict[int, bytearray] = defaultdict(bytearray)
        self._coming: dict[int, bytearray] = defaultdict(bytearray)
        self._room = memoryview(bytearray(_READ_BYTES))

    def tell(self, said: dict[str, Any], peer: int | None = None) -> None:
        """Queue a report for a rank, or for all; what is queued goes with `pump`."""
        line = json.dumps(said).encode() + b"\n"
        for each in self.peers if peer is None else [peer]:
            self._going[each] += line

    def pump(self, wait_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Send what there is room for, wait for up to so long, and return what has come."""
        came: list[tuple[int, dict[str, Any]]] = []
        with suppress(CommError, OSError, ValueError):  # no way to a rank, or closed by a fork
            sends = [peer for peer in self.peers if not self._flush(peer)]
            self._streams.wait([p for p in self.peers if p not in self.gone()], sends, wait_s)
            for peer in self.peers:
                came += [(peer, said) for said in self._read(peer)]
                self._flush(peer)
        return came

    def gone(self) -> tuple[int, ...]:
        """Return the ranks whose process has ended."""
        return self._streams.gone()

    def close(self) -> None:
        """End the streams."""
        self._streams.close()

    def _flush(self, peer: int) -> bool:
        going = self._going[peer]
        while going:
            with memoryview(bytes(going)) as view:
                sent = self._streams.send_some(peer, view)
            if not sent:
                return False
            del going[:sent]
        return True

    def _read(self, peer: int) -> list[dict[str, Any]]:
        coming = self._coming[peer]
        while got := self._streams.recv_some(peer, self._room):
            coming += self._room[:got]
        *lines, rest = bytes(coming).split(b"\n")
        coming[:] = rest
        return [json.loads(line) for line in lines]
