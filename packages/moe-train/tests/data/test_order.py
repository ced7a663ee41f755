import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_train.data.order import SampleOrder


@given(num=st.integers(1, 3000), seed=st.integers(0, 2**80), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(num: int, seed: int, epoch: int) -> None:
    found = SampleOrder(num, seed).sequence_of(np.arange(epoch * num, (epoch + 1) * num))
    assert np.array_equal(np.sort(found), np.arange(num))


@given(num=st.integers(1, 500), seed=st.integers(0, 2**63), data=st.data())
def test_answer_does_not_depend_on_how_it_is_asked(
    num: int, seed: int, data: st.DataObject
) -> None:
    asked = np.array(data.draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=30)))
    together = SampleOrder(num, seed).sequence_of(asked)
    order = SampleOrder(num, seed)
    alone = [int(order.sequence_of(np.array([i]))[0]) for i in reversed(asked)]
    assert together.tolist() == alone[::-1]


def test_order_is_the_same_in_every_version() -> None:
    # Written down once: a change of these numbers breaks the resuming of runs.
    assert SampleOrder(10, 0).sequence_of(np.arange(20)).tolist() == [
        3,
        9,
        0,
        1,
        8,
        6,
        2,
        4,
        7,
        5,
        1,
        0,
        3,
        8,
        6,
        5,
        9,
        4,
        7,
        2,
    ]
    assert SampleOrder(1000, 7).sequence_of(np.array([0, 1, 999, 12345])).tolist() == [
        85,
        853,
        990,
        574,
    ]


def test_seeds_and_epochs_give_unlike_orders() -> None:
    n = 1000
    first = SampleOrder(n, 0).sequence_of(np.arange(2 * n))
    other = SampleOrder(n, 1).sequence_of(np.arange(n))
    assert np.mean(first[:n] == first[n:]) < 0.02
    assert np.mean(first[:n] == other) < 0.02
    assert np.mean(first[:n] == np.arange(n)) < 0.02


def test_places_are_spread_evenly() -> None:
    """Chi-squared over seeds: where sequences of a small corpus stand first in an epoch."""
    n, draws = 13, 5200
    start = random.randrange(2**32)
    counts = np.zeros((3, n))
    for seed in range(start, start + draws):
        order = SampleOrder(n, seed).sequence_of(np.arange(3))
        counts[np.arange(3), order] += 1
    chi = ((counts - draws / n) ** 2 / (draws / n)).sum(axis=1)
    assert (chi < 50).all(), f"first seed {start}: {chi}"  # 12 degrees of freedom: p < 2e-6


def test_shape_is_kept_and_empty_is_allowed() -> None:
    order = SampleOrder(5, 0)
    assert order.sequence_of(np.zeros((2, 3), dtype=np.int64)).shape == (2, 3)
    assert order.sequence_of(np.array([], dtype=np.int64)).shape == (0,)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_sequences=0"):
        SampleOrder(0, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        SampleOrder(1, -1)
    with pytest.raises(ValueError, match="got -2"):
        SampleOrder(1, 0).sequence_of(np.array([1, -2]))
