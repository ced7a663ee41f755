from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_train.data.mixture import Mixture, MixtureOrder, SourceShare
from moe_train.data.order import SampleOrder

weights_lists = st.lists(
    st.decimals(min_value="0.0001", max_value=9, places=7).map(str), min_size=2, max_size=6
)


def shares(*sources: tuple[int, str]) -> list[SourceShare]:
    return [
        SourceShare(name=f"s{place}", weight=weight, num_sequences=count)
        for place, (count, weight) in enumerate(sources)
    ]


def in_turn(weights: list[str], num_samples: int) -> list[int]:
    """Sources one by one: of those whose next sample may come, the one that is needed first."""
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    counts, chosen = [0] * len(weights), []
    for place in range(num_samples):
        ends = [
            (-(-(count + 1) // share), i)
            for i, (count, share) in enumerate(zip(counts, shares, strict=True))
            if count // share <= place
        ]
        _, best = min(ends)
        counts[best] += 1
        chosen.append(best)
    return chosen


@settings(max_examples=40, deadline=None)
@given(weights=weights_lists)
def test_counts_are_within_one_sample_of_the_weights_at_every_sample(weights: list[str]) -> None:
    source, number = Mixture(weights).locate(np.arange(400))
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    counts = [0] * len(weights)
    for n, (chosen, before) in enumerate(zip(source, number, strict=True), start=1):
        assert before == counts[chosen]
        counts[chosen] += 1
        assert all(abs(c - share * n) < 1 for c, share in zip(counts, shares, strict=True))


@settings(max_examples=20, deadline=None)
@given(weights=weights_lists)
def test_the_order_is_that_of_one_turn_after_another(weights: list[str]) -> None:
    assert Mixture(weights).locate(np.arange(120))[0].tolist() == in_turn(weights, 120)


@pytest.mark.parametrize("weights", [["3", "2", "0.5"], ["0.3333333", "0.1415926", "0.2718281"]])
def test_any_sample_is_found_without_those_before_it(weights: list[str]) -> None:
    whole = Mixture(weights)
    source, number = whole.locate(np.arange(40_000))
    asked = np.array([[39_999, 5], [16_384, 16_383], [40, 5]])
    for i in range(2):
        found = Mixture(weights).locate(asked)[i]
        assert found.tolist() == (source, number)[i][asked].tolist()
    assert whole.counts(32_800) == np.bincount(source[:32_800]).tolist()


def test_far_periods_are_like_the_first() -> None:
    mixture = Mixture([0.7, 0.2, 0.1])
    far = 10**15
    source, number = mixture.locate(np.arange(far, far + 10))
    assert source.tolist() == mixture.locate(np.arange(10))[0].tolist()
    assert sorted(number[source == 0]) == list(range(7 * far // 10, 7 * far // 10 + 7))
    assert mixture.counts(far) == [7 * far // 10, 2 * far // 10, far // 10]


def test_weights_are_exact_decimals_and_only_their_ratios_matter() -> None:
    assert Mixture([0.1, 0.2]).period == Mixture(["1e30", "2e30"]).period == 3
    assert Mixture(["1e-40", "1"]).locate(np.array([0, 1, 20_000]))[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("weights", [[], [0], [1, -2], ["nan"], [float("inf")]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weight|source"):
        Mixture(weights)


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        Mixture([1, 2]).locate(np.array([3, -1]))


def test_one_source_has_the_plain_order() -> None:
    index = np.arange(100)
    source, sequence = MixtureOrder(shares((23, "0.5")), 7).locate(index)
    assert not source.any()
    assert sequence.tolist() == SampleOrder(23, 7).sequence_of(index).tolist()


def test_each_source_goes_through_its_sequences_once_an_epoch() -> None:
    order = MixtureOrder(shares((10, "0.25"), (30, "0.75")), 3)
    source, sequence = order.locate(np.arange(80))
    for place, count in enumerate((10, 30)):
        own = sequence[source == place]
        assert len(own) == 2 * count
        assert sorted(own[:count]) == sorted(own[count:]) == list(range(count))
    first = [sequence[source == place][:10].tolist() for place in (0, 1)]
    assert first[0] != [number % 10 for number in first[1]], "sources shuffle by seeds of their own"


def test_a_run_that_goes_on_finds_its_place_without_the_turns_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, seen = ["1234567", "98765431", "7"], 5 * (1 << 14) + 77
    first = Mixture(weights)
    expected = first.locate(np.arange(seen, seen + 40_000))
    begin = first.begin_of(seen)
    blocks, take = [], Mixture._take_turns

    def counted(mixture: Mixture, block: int) -> object:
        blocks.append(block)
        return take(mixture, block)

    monkeypatch.setattr(Mixture, "_take_turns", counted)
    source, number = Mixture(weights, begin).locate(np.arange(seen, seen + 40_000))
    assert (source == expected[0]).all() and (number == expected[1]).all()
    assert blocks == [5, 6, 7]
    other = Mixture(["7", "1234567", "98765431"], begin)
    assert other.begin_of(seen)[3:] == (0, 0, 0, 0), "of another mixture it is of no use"
    assert Mixture(["3"]).begin_of(seen) == ()
