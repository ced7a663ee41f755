"""Which source gives the n-th sample of a weighted mixture, and which of its samples that is.

Invariant: after n samples, for every n, source i with share p_i has given floor(p_i * n) or
ceil(p_i * n) of them; and the answer depends on the weights and n alone, so every layout, and a
resumed run, sees the same order. Weights are exact decimals: 0.1 means one tenth.

Method and proof. The k-th sample (k = 1, 2, ...) of source i may take the places floor((k-1)/p_i)+1
to ceil(k/p_i). A source that keeps these windows has given no more than ceil(p_i n) samples after n
places, because of their beginnings, and no less than floor(p_i n), because of their ends. Giving
every place to all sources at once, p_i to source i, fills each window with exactly one sample; a
fractional assignment of unit jobs to places implies an integral one, and then "earliest end first"
among the jobs whose window has begun finds one (Jackson's rule). This is Tijdeman's answer to the
chairman assignment problem (Discrete Mathematics 32, 1980), with the windows of Baruah et al.,
"Proportionate progress" (Algorithmica 15, 1996). No rule that only ranks the jobs by a key keeps
the bound (Balinski and Young), so the order is computed in turn, about a microsecond a sample, and
counts at every 2**14-th place are kept to begin from, also by a run that goes on (`begin`); after
`period` places it repeats.

    mixture = Mixture(["0.7", "0.3"])
    source, number = mixture.locate(np.arange(10))     # sample `number`, from 0, of that source
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from moe_train.data.order import SampleOrder
from moe_train.errors import TrainValueError

_TURNS = 1 << 14
_KEPT_BLOCKS = 4


class Mixture:
    """The order in which sources take turns.

    Args:
        weights: one for each source, as decimals in text, ints or floats (as they are printed);
            only their ratios matter.
        begin: what `begin_of` has found of an equal mixture, so that places behind it need no
            others; that of another mixture is of no use, and is left.

    Raises:
        ValueError: there is none, or one is not a positive finite number.
    """

    def __init__(self, weights: Sequence[str | float], begin: Sequence[int] = ()) -> None:
        self._integers = _integer_weights(weights)
        self.period = sum(self._integers)
        # Counts of each source when a block begins, one entry for each block found so far.
        self._begins: dict[int, list[int]] = {0: [0] * len(weights)}
        own = len(weights)
        if len(begin) == 2 * own + 1 and list(begin[:own]) == self._integers:
            self._begins[begin[own]] = list(begin[own + 1 :])
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def locate(
        self, sample_index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sample its source, and how many samples of that source come before it.

        Args:
            sample_index: int64, any shape, at least 0.

        Raises:
            ValueError: an index is negative.
        """
        index = np.asarray(sample_index, dtype=np.int64)
        if index.size and int(index.min()) < 0:
            raise TrainValueError(f"sample_index must be at least 0, got {int(index.min())}")
        if len(self._integers) == 1:
            return np.zeros_like(index), index.copy()
        rounds, places = self._divide(index)
        source, number = np.empty_like(index), np.empty_like(index)
        blocks = places // _TURNS
        for block in np.unique(blocks):
            inside = blocks == block
            sources = self._sources_of(int(block))
            offsets = places[inside] - int(block) * _TURNS
            source[inside] = sources[offsets]
            earlier = np.empty((len(self._integers), len(sources)), dtype=np.int64)
            for i, begin in enumerate(self._begins[int(block)]):
                taken = sources == i
                earlier[i] = begin + np.cumsum(taken) - taken
            number[inside] = earlier[source[inside], offsets]
        if rounds.any():
            number += rounds * np.array(self._integers, dtype=np.int64)[source]
        return source, number

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each source gives."""
        rounds, places = divmod(num_samples, self.period)
        sources = self._sources_of(places // _TURNS)[: places % _TURNS]
        begins = self._begins[places // _TURNS]
        own = np.bincount(sources, minlength=len(self._integers)).tolist()
        return [
            rounds * weight + begin + count
            for weight, begin, count in zip(self._integers, begins, own, strict=True)
        ]

    def begin_of(self, sample: int) -> tuple[int, ...]:
        """The weights, the last known block up to a sample, its counts; none of a single source."""
        if len(self._integers) == 1:
            return ()
        block = self._known(sample % self.period // _TURNS)
        return (*self._integers, block, *self._begins[block])

    def _known(self, block: int) -> int:
        """The last block up to this one of which it is known how it begins; mostly this one."""
        return block if block in self._begins else max(b for b in self._begins if b <= block)

    def _divide(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Whole periods before each sample, and its place in its own."""
        if self.period > np.iinfo(np.int64).max:  # no sample number reaches the second one
            return np.zeros_like(index), index
        rounds, places = np.divmod(index, self.period)
        return rounds, places

    def _sources_of(self, block: int) -> NDArray[np.int64]:
        """The sources of one block of places of a period, int64 [at most _TURNS]."""
        for known in range(self._known(block), block):
            added = np.bincount(self._block(known), minlength=len(self._integers)).tolist()
            begins = zip(self._begins[known], added, strict=True)
            self._begins[known + 1] = [begin + more for begin, more in begins]
        return self._block(block)

    def _block(self, block: int) -> NDArray[np.int64]:
        if block not in self._blocks:
            while len(self._blocks) >= _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = self._take_turns(block)
        return self._blocks[block]

    def _take_turns(self, block: int) -> NDArray[np.int64]:
        weights, total = self._integers, self.period
        # (end, begin) of the window of each source's next sample.
        counts = list(self._begins[block])
        ends = [-(-(k + 1) * total // w) for k, w in zip(counts, weights, strict=True)]
        opens = [k * total // w for k, w in zip(counts, weights, strict=True)]
        places = range(block * _TURNS, min(total, (block + 1) * _TURNS))
        sources = range(len(weights))
        chosen = []
        for place in places:  # a window that opens at k*total//w holds the place of that number
            best, best_end = -1, 0
            for i in sources:
                if opens[i] <= place and (best < 0 or ends[i] < best_end):
                    best, best_end = i, ends[i]
            chosen.append(best)
            counts[best] += 1
            opens[best] = counts[best] * total // weights[best]
            ends[best] = -(-(counts[best] + 1) * total // weights[best])
        return np.array(chosen, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """What the order of samples needs to know of a source.

    Attributes:
        name: of its table.
        weight: its share as a decimal in text, relative to the other sources.
        num_sequences: how many training sequences it has.
    """

    name: str
    weight: str
    num_sequences: int


class MixtureOrder:
    """Which sequence of which source is the n-th sample of a run, in epochs of each source.

    With one source this is `SampleOrder` of the run's seed.

    Args:
        sources: at least one.
        seed: of the run; each of several sources shuffles with a seed of its own made of it.
        begin: of the mixture, as in `Mixture`.
    """

    def __init__(
        self, sources: Sequence[SourceShare], seed: int, begin: Sequence[int] = ()
    ) -> None:
        self.mixture = Mixture([source.weight for source in sources], begin)
        self.orders = tuple(
            SampleOrder(source.num_sequences, seed + (place << 32))
            for place, source in enumerate(sources)
        )

    def locate(
        self, sample_index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and sequence number of each sample, int64 in the shape of `sample_index`."""
        source, number = self.mixture.locate(sample_index)
        for place, order in enumerate(self.orders):
            own = source == place
            number[own] = order.sequence_of(number[own])
        return source, number


def _integer_weights(weights: Sequence[str | float]) -> list[int]:
    """Whole numbers in the same ratios, without a common divisor."""
    fractions = []
    for weight in weights:
        value = Decimal(str(weight))
        if not value.is_finite() or value <= 0:
            raise TrainValueError(f"weight {weight} must be a finite number above 0")
        fractions.append(Fraction(value))
    if not fractions:
        raise TrainValueError("a mixture needs at least one source")
    multiple = math.lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * multiple) for fraction in fractions]
    divisor = math.gcd(*integers)
    return [integer // divisor for integer in integers]
