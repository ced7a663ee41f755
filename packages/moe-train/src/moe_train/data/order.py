"""Which sequence is read as the n-th sample of a run: a pure function, with nothing to remember.

Invariant: the answer depends on (seed, sample index, number of sequences) only; not on the layout,
on what was asked before, or on the version of any library. Each epoch visits every sequence once.

The permutation of an epoch is a balanced Feistel network over the smallest power of 4 that holds
the sequences, walked along its cycle until it lands inside them (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), with splitmix64's finaliser as the round function; so it costs no
memory, however large the corpus.

    order = SampleOrder(num_sequences=1000, seed=0)
    order.sequence_of(np.arange(32))    # sequences of the first batch of 32
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from moe_train.errors import TrainValueError

_ROUNDS: Final = 6
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class SampleOrder:
    """Shuffled order of `num_sequences` sequences, anew in every epoch."""

    __slots__ = ("_half_bits", "num_sequences", "seed")

    def __init__(self, num_sequences: int, seed: int) -> None:
        if num_sequences < 1:
            raise TrainValueError(f"num_sequences={num_sequences} must be at least 1")
        if seed < 0:
            raise TrainValueError(f"seed={seed} must be at least 0")
        self.num_sequences = num_sequences
        self.seed = seed
        self._half_bits = max(1, ((num_sequences - 1).bit_length() + 1) // 2)

    def sequence_of(self, sample_index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequence numbers of the samples, in an array of the same shape.

        Args:
            sample_index: int64, any shape; samples count on through the epochs.

        Raises:
            ValueError: an index is negative.
        """
        index = np.asarray(sample_index, dtype=np.int64)
        if index.size and int(index.min()) < 0:
            raise TrainValueError(f"sample_index must be at least 0, got {int(index.min())}")
        result = np.empty_like(index)
        epochs = index // self.num_sequences
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permute(index[chosen] % self.num_sequences, int(epoch))
        return result

    def _permute(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        keys = self._round_keys(epoch)
        values = self._feistel(places.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.num_sequences)
        # The walk ends: the cycle leads back to the start, which lies inside.
        while outside.size:
            values[outside] = self._feistel(values[outside], keys)
            outside = outside[values[outside] >= self.num_sequences]
        return values.astype(np.int64)

    def _round_keys(self, epoch: int) -> list[np.uint64]:
        state = _mix_int(
            _mix_int(self.seed & _MASK) ^ (self.seed >> 64) ^ (epoch * _GOLDEN & _MASK)
        )
        keys = []
        for _ in range(_ROUNDS):
            state = _mix_int((state + _GOLDEN) & _MASK)
            keys.append(np.uint64(state))
        return keys

    def _feistel(self, values: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser on an array; multiplication wraps at 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    """The same finaliser on one Python int below 2**64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
