"""Put whole documents into sequences of one length: best fit, longest first.

Invariant: a function of the documents' lengths alone. Every piece lies in exactly one bin, no bin
holds more than `capacity` tokens, and as many bins are used as by placing the pieces one by one,
longest first, each into the fullest bin that has room (Ding et al., "Fewer Truncations Improve
Language Modeling", 2024).

Pieces of one length are placed together: a bin with `free` room takes floor(free / length) of them
before the next fullest is looked at, so that the work is a few array operations for each pair of a
length and a room, and millions of documents take seconds.

    pieces = cut_pieces(np.array([0, 5, 9]), capacity=8, truncate=False)
    bins = best_fit(pieces.length, capacity=8)
    bins.piece[bins.start[0] : bins.start[1]]    # the pieces of the first bin
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Runs of tokens that lie whole in a sequence.

    Attributes:
        start: first token of each piece in the token file, int64 [P].
        length: its tokens, int32 [P].
        goes_on: whether the same document goes on in the next piece, bool [P].
        cut_documents: documents longer than a sequence.
        dropped_tokens: their tokens behind the first sequence, where documents are truncated.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int32]
    goes_on: NDArray[np.bool_]
    cut_documents: int
    dropped_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Which pieces share a sequence: bin i has `piece[start[i] : start[i + 1]]`.

    `piece` is int64 [P], in the order of the token file within a bin; bins are in the order of
    their first pieces. `start` is int64 [number of bins + 1].
    """

    piece: NDArray[np.int64]
    start: NDArray[np.int64]


def cut_pieces(document_starts: NDArray[np.int64], *, capacity: int, truncate: bool) -> Pieces:
    """The pieces of documents, each of at most `capacity` tokens; empty documents have none.

    Args:
        document_starts: int64 [D + 1]; document i has the tokens from its start to the next one's.
        truncate: of a longer document keep the first `capacity` tokens; false cuts it into pieces.
    """
    starts = np.asarray(document_starts, dtype=np.int64)
    lengths = np.diff(starts)
    longer = lengths > capacity
    cut, dropped = int(longer.sum()), 0
    if truncate or not cut:
        dropped = int((lengths[longer] - capacity).sum())
        kept = lengths > 0
        length = np.minimum(lengths[kept], capacity)
        start, goes_on = starts[:-1][kept], np.zeros(len(length), dtype=np.bool_)
    else:
        counts = -(-lengths // capacity)
        document = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = starts[document] + number * capacity
        length = np.minimum(starts[document + 1] - start, capacity)
        goes_on = start + length < starts[document + 1]
    return Pieces(
        start=start,
        length=length.astype(np.int32),
        goes_on=goes_on,
        cut_documents=cut,
        dropped_tokens=dropped,
    )


def best_fit(lengths: NDArray[np.int32], *, capacity: int) -> Bins:
    """Place pieces of 1 to `capacity` tokens, longest first, each into the fullest bin with room.

    Args:
        lengths: int32 [P].
    """
    bin_of = np.empty(len(lengths), dtype=np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    rooms = _Rooms(capacity)
    first = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        last = first + int(counts[length])
        while first < last:
            bins, fit = rooms.take(length, last - first)
            here = min(len(bins) * fit, last - first)
            bin_of[by_length[first : first + here]] = np.repeat(bins, fit)[:here]
            rooms.give_back(bins, length, fit, here)
            first += here
    return _in_order(bin_of, rooms.num_bins)


def single(lengths: NDArray[np.int32]) -> Bins:
    """One bin for each piece."""
    count = len(lengths)
    return Bins(piece=np.arange(count), start=np.arange(count + 1))


class _Rooms:
    """Bins by the room that they have left."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._bins: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
        self._count = np.zeros(capacity + 1, dtype=np.int64)
        self._free = 0
        self.num_bins = 0

    def take(self, length: int, wanted: int) -> tuple[NDArray[np.int64], int]:
        """Fullest bins with room for `length`, and how many such pieces fit into each.

        At most as many bins as `wanted` pieces need, all with the same room; new ones when no bin
        has any.
        """
        fitting = np.flatnonzero(self._count[length:])
        self._free = length + int(fitting[0]) if len(fitting) else self._capacity
        fit = self._free // length
        needed = -(-wanted // fit)
        if not len(fitting):
            self.num_bins += needed
            return np.arange(self.num_bins - needed, self.num_bins), fit
        bins = np.concatenate(self._bins.pop(self._free))
        if len(bins) > needed:
            self._bins[self._free] = [bins[needed:]]
        self._count[self._free] = max(0, len(bins) - needed)
        return bins[:needed], fit

    def give_back(self, bins: NDArray[np.int64], length: int, fit: int, placed: int) -> None:
        """Note the room that is left after `placed` pieces, `fit` in each bin but the last."""
        full = placed // fit
        self._add(self._free - fit * length, bins[:full])
        if full < len(bins):
            self._add(self._free - (placed - full * fit) * length, bins[full:])

    def _add(self, free: int, bins: NDArray[np.int64]) -> None:
        if free and len(bins):
            self._bins[free].append(bins)
            self._count[free] += len(bins)


def _in_order(bin_of: NDArray[np.int64], num_bins: int) -> Bins:
    """The pieces bin by bin, bins in the order of their first pieces."""
    piece = np.argsort(bin_of, kind="stable")
    sizes = np.bincount(bin_of, minlength=num_bins)
    start = np.concatenate(([0], np.cumsum(sizes)))
    order = np.argsort(piece[start[:-1]], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(num_bins)
    piece = np.argsort(rank[bin_of], kind="stable")
    return Bins(piece=piece, start=np.concatenate(([0], np.cumsum(sizes[order]))))
