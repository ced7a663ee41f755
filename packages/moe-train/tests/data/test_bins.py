import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_train.data.bins import Bins, best_fit, cut_pieces, single


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


def contents(bins: Bins) -> list[list[int]]:
    return [part.tolist() for part in np.split(bins.piece, bins.start[1:-1])]


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(1, 40),
    fractions=st.lists(st.floats(0, 1), max_size=80),
)
def test_bins_are_as_full_as_by_placing_one_piece_at_a_time(
    capacity: int, fractions: list[float]
) -> None:
    lengths = [1 + int(fraction * (capacity - 1)) for fraction in fractions]
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    bins = best_fit(np.array(lengths, dtype=np.int32), capacity=capacity)
    found = contents(bins) if lengths else []
    assert sorted(capacity - sum(lengths[p] for p in pieces) for pieces in found) == sorted(rooms)
    assert sorted(p for pieces in found for p in pieces) == list(range(len(lengths)))
    assert found == sorted(sorted(pieces) for pieces in found), "in the order of the token file"


def test_a_hundred_thousand_documents_fill_their_bins() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 100_000).astype(np.int32)
    bins = best_fit(lengths, capacity=2048)
    assert lengths.sum() / (2048 * (len(bins.start) - 1)) > 0.99
    assert np.add.reduceat(lengths[bins.piece], bins.start[:-1]).max() <= 2048


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), max_size=20), capacity=st.integers(1, 12))
def test_a_long_document_is_cut_into_pieces_that_go_on(lengths: list[int], capacity: int) -> None:
    pieces = cut_pieces(starts_of(lengths), capacity=capacity, truncate=False)
    expected = []
    for start, length in zip(starts_of(lengths), lengths, strict=False):
        for offset in range(0, length, capacity):
            end = min(length, offset + capacity)
            expected.append((start + offset, end - offset, end < length))
    found = zip(pieces.start, pieces.length, pieces.goes_on, strict=True)
    assert [tuple(map(int, piece)) for piece in found] == expected
    assert pieces.cut_documents == sum(length > capacity for length in lengths)
    assert pieces.dropped_tokens == 0


def test_truncation_keeps_the_beginning_and_counts_what_is_dropped() -> None:
    pieces = cut_pieces(starts_of([3, 0, 9, 4, 6]), capacity=4, truncate=True)
    assert pieces.start.tolist() == [0, 3, 12, 16]
    assert pieces.length.tolist() == [3, 4, 4, 4]
    assert not pieces.goes_on.any()
    assert (pieces.cut_documents, pieces.dropped_tokens) == (2, 7)


def test_a_bin_for_each_piece() -> None:
    assert contents(single(np.array([3, 1, 2], dtype=np.int32))) == [[0], [1], [2]]
