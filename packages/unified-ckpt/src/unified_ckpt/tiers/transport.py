"""Copies on their way between nodes: bytes of files, over gloo, in chunks of bounded memory.

The files of a copy count as one stream, which is cut into as many lanes as both nodes have ranks
for; a lane goes from one rank to one other. All lanes of a rank move at once, chunk by chunk, with
the next chunk posted before the last one is written: no rank waits for one that waits for it. One
that cannot read or write any more goes on with the exchange, so that its peers need not wait for
the time limit, and raises at the end; what it sent then differs from its checksums.

    move_lanes(lanes_of_rank, group=group, timeout_s=60)
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from unified_ckpt.errors import CorruptCheckpointError, SavePeerError
from unified_ckpt.files import make_folders, open_for_write, read_at, write_at
from unified_ckpt.geometry.tensors import byte_view

CHUNK_BYTES = 8 * 1024 * 1024  # two of them for each lane of a rank


class FileStream:
    """The files of a copy, one after the other, as one range of bytes in a folder."""

    def __init__(self, folder: Path, files: Sequence[tuple[str, int]]) -> None:
        self._folder = folder
        self._names = [name for name, _ in files]
        self._begins = list(accumulate((size for _, size in files), initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._begins[-1]

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from a byte on.

        Raises:
            CorruptCheckpointError: a file is shorter than it was.
        """
        for name, at, piece in self._pieces(begin, buffer):
            with (self._folder / name).open("rb") as file:
                if read_at(file.fileno(), [piece], at) != len(piece):
                    raise CorruptCheckpointError(f"{self._folder / name}: is cut off")

    def write(self, begin: int, buffer: memoryview) -> None:
        """Write a buffer from a byte on; not durable yet."""
        for name, at, piece in self._pieces(begin, buffer):
            with open_for_write(self._folder / name) as fd:
                write_at(fd, [piece], at)

    def make_files(self) -> None:
        """Make every file, the empty ones included."""
        for name in self._names:
            make_folders((self._folder / name).parent)
            with open_for_write(self._folder / name):
                pass

    def _pieces(self, begin: int, buffer: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        done = 0
        while done < len(buffer):
            number = bisect_right(self._begins, begin + done) - 1
            at = begin + done - self._begins[number]
            length = min(len(buffer) - done, self._begins[number + 1] - begin - done)
            yield self._names[number], at, buffer[done : done + length]
            done += length


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank's end of a range of a stream that goes to or comes from a rank `peer` of the world.

    `number` is the same at both ends, and no other lane's between the two.
    """

    number: int
    stream: FileStream
    begin: int
    end: int
    peer: int
    sends: bool

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return -(-(self.end - self.begin) // CHUNK_BYTES)


def lane_ends(
    num_bytes: int, senders: Sequence[int], receivers: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Cut a stream into lanes: (sender, receiver, first byte, end) of each."""
    count = min(len(senders), len(receivers))
    cuts = [num_bytes * number // count for number in range(count + 1)]
    return list(zip(senders, receivers, cuts, cuts[1:], strict=False))


def move_lanes(lanes: Sequence[Lane], *, group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Send and receive all lanes of this rank; the rank at the other end of each does the same.

    Raises:
        SavePeerError: a peer is gone, or a chunk took longer than `timeout_s`.
        CorruptCheckpointError: a file that is sent is shorter than it was.
    """
    failed: list[OSError | CorruptCheckpointError] = []
    buffers = [torch.empty((2, CHUNK_BYTES), dtype=torch.uint8) for _ in lanes]
    posted: list[_Chunk] = []
    for number in range(max((lane.num_chunks for lane in lanes), default=0) + 1):
        following = [
            _Chunk(lane, number, buffer[number % 2], group=group, failed=failed)
            for lane, buffer in zip(lanes, buffers, strict=True)
            if number < lane.num_chunks
        ]
        for chunk in posted:
            chunk.finish(timeout_s)
        posted = following
    if failed:
        raise failed[0]


class _Chunk:
    """One chunk of a lane under way."""

    def __init__(
        self,
        lane: Lane,
        number: int,
        memory: torch.Tensor,
        *,
        group: dist.ProcessGroup | None,
        failed: list[OSError | CorruptCheckpointError],
    ) -> None:
        self._lane = lane
        self._begin = lane.begin + number * CHUNK_BYTES
        self._memory = memory[: min(CHUNK_BYTES, lane.end - self._begin)]
        self._failed = failed
        if lane.sends:
            self._use_files(lane.stream.read)
        post = dist.isend if lane.sends else dist.irecv
        try:
            tag = 2 * lane.number + number % 2
            self._work = post(self._memory, lane.peer, group=group, tag=tag)
        except RuntimeError as error:
            raise self._lost(error) from error

    def finish(self, timeout_s: float) -> None:
        """Wait for the chunk, and write it if it came."""
        try:
            if self._work is not None:
                self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._lost(error) from error
        if not self._lane.sends:
            self._use_files(self._lane.stream.write)

    def _use_files(self, use: Callable[[int, memoryview], None]) -> None:
        if self._failed:
            return
        try:
            use(self._begin, byte_view(self._memory))
        except (OSError, CorruptCheckpointError) as error:
            self._failed.append(error)

    def _lost(self, error: RuntimeError) -> SavePeerError:
        way = "sent to" if self._lane.sends else "awaited from"
        return SavePeerError(
            f"a copy {way} rank {self._lane.peer} stopped at byte {self._begin}; that rank died, "
            f"is stuck or unreachable: {error}"
        )
