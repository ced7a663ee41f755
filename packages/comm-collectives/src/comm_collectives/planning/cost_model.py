"""How long an exchange of so many bytes takes: an alpha-beta line per size class.

One line (latency + bytes / bandwidth) cannot follow real links, whose caches and protocols give
each size class a latency and a bandwidth of its own. The lines meet at knots: no jumps.

    curve = fit_cost_model([(4096, 30e-6), (65536, 50e-6), (1 << 20, 500e-6)])
    curve.seconds(100_000)
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from comm_collectives.errors import CommValueError

MAX_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Seconds by bytes: constant up to the first knot, straight between knots, then a last line.

    `knots` are pairs (bytes, seconds), both rising (seconds may stay equal); `bytes_per_s` is the
    bandwidth beyond the last one.

    Raises:
        ValueError: no knots, knots out of order, or numbers that are not positive and finite.
    """

    knots: tuple[tuple[float, float], ...]
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.knots:
            raise CommValueError("knots is empty; give at least (0, latency in seconds)")
        for num_bytes, seconds in self.knots:
            if not (0 <= num_bytes < math.inf and 0 <= seconds < math.inf):
                raise CommValueError(
                    f"knot ({num_bytes}, {seconds}) must be (bytes, seconds), both >= 0 and finite"
                )
        for before, after in pairwise(self.knots):
            if before[0] >= after[0] or before[1] > after[1]:
                raise CommValueError(
                    f"knot {after} follows {before}; bytes must rise and seconds must not fall"
                )
        if not 0 < self.bytes_per_s < math.inf:
            raise CommValueError(f"bytes_per_s={self.bytes_per_s} must be positive and finite")

    @classmethod
    def line(cls, *, alpha_s: float, bytes_per_s: float) -> Self:
        """Return the plain line `alpha_s + bytes / bytes_per_s`."""
        return cls(knots=((0.0, alpha_s),), bytes_per_s=bytes_per_s)

    @property
    def alpha_s(self) -> float:
        """Seconds of the smallest exchange."""
        return self.knots[0][1]

    def seconds(self, num_bytes: float) -> float:
        """Return the time of an exchange of `num_bytes`."""
        at = bisect_right(self.knots, num_bytes, key=lambda knot: knot[0])
        if at == 0:
            return self.alpha_s
        low, low_s = self.knots[at - 1]
        if at == len(self.knots):
            return low_s + (num_bytes - low) / self.bytes_per_s
        high, high_s = self.knots[at]
        return low_s + (high_s - low_s) * (num_bytes - low) / (high - low)


def fit_cost_model(
    samples: Iterable[tuple[float, float]], *, max_lines: int = MAX_LINES
) -> CostCurve:
    """Fit a cost curve to measured pairs (bytes, seconds), minimising relative errors.

    Repeated sizes count by their median, so that a disturbed measurement does no harm. Starting
    with one line, knots are added where they help most, as long as they explain more than noise
    (generalised cross-validation). About one size per factor of 2 is a good measurement.

    Raises:
        ValueError: fewer than two different sizes, sizes or times that are not positive, or
            `max_lines` below 1.
    """
    times: dict[float, list[float]] = {}
    for num_bytes, seconds in samples:
        if not (0 < num_bytes < math.inf and 0 < seconds < math.inf):
            raise CommValueError(
                f"sample ({num_bytes}, {seconds}) must be (bytes, seconds), both positive"
            )
        times.setdefault(num_bytes, []).append(seconds)
    if len(times) < 2:
        raise CommValueError(
            f"{len(times)} different sizes cannot show latency and bandwidth; measure at least two"
        )
    if max_lines < 1:
        raise CommValueError(f"max_lines={max_lines} must be at least 1")
    sizes = sorted(times)
    medians = [statistics.median(times[size]) for size in sizes]
    knots = _best_knots(sizes, medians, max_lines)
    (low, low_s), (high, high_s) = knots[-2:]
    bytes_per_s = (high - low) / (high_s - low_s) if high_s > low_s else high / high_s
    return CostCurve(knots=knots, bytes_per_s=bytes_per_s)


_Knots = tuple[tuple[float, float], ...]


def _best_knots(sizes: Sequence[float], seconds: Sequence[float], max_lines: int) -> _Knots:
    """Add knots one by one, each where it helps most, and return the set with the best score."""
    positions = [sizes[0], sizes[-1]]
    score, best = _score(sizes, seconds, positions)
    while len(positions) <= max_lines:
        candidates = [sorted([*positions, size]) for size in sizes if size not in positions]
        scored = [(*_score(sizes, seconds, candidate), candidate) for candidate in candidates]
        if not scored:
            break
        new_score, knots, positions = min(scored)
        if new_score < score:
            score, best = new_score, knots
    return best


def _score(
    sizes: Sequence[float], seconds: Sequence[float], positions: list[float]
) -> tuple[float, _Knots]:
    """Fit with knots at these positions; score: square error by the square of sizes left free.

    A knot takes two, its height and its position. A fit that leaves none scores worst.
    """
    heights = _not_falling(_fit_heights(sizes, seconds, positions))
    knots = tuple(zip(positions, heights, strict=True))
    free = len(sizes) - 2 * (len(positions) - 1)
    if free < 1:
        return math.inf if len(positions) > 2 else 0.0, knots
    curve = CostCurve(knots=knots, bytes_per_s=1.0)
    squares = sum((curve.seconds(n) / t - 1) ** 2 for n, t in zip(sizes, seconds, strict=True))
    return squares / free**2, knots


def _fit_heights(
    sizes: Sequence[float], seconds: Sequence[float], positions: Sequence[float]
) -> list[float]:
    """Least squares of relative errors over the seconds at the knots, each of which is a size.

    Every size is a mean of its two neighbouring knots, so the normal equations are tridiagonal.
    """
    diagonal = [0.0] * len(positions)
    beside = [0.0] * (len(positions) - 1)
    right = [0.0] * len(positions)
    for size, time in zip(sizes, seconds, strict=True):
        low = min(bisect_right(positions, size), len(positions) - 1) - 1
        share = (size - positions[low]) / (positions[low + 1] - positions[low])
        near, far, weight = 1 - share, share, 1 / time**2
        diagonal[low] += weight * near * near
        diagonal[low + 1] += weight * far * far
        beside[low] += weight * near * far
        right[low] += weight * near * time
        right[low + 1] += weight * far * time
    return _tridiagonal(diagonal, beside, right)


def _tridiagonal(diagonal: list[float], beside: list[float], right: list[float]) -> list[float]:
    for i, upper in enumerate(beside):
        factor = upper / diagonal[i]
        diagonal[i + 1] -= factor * upper
        right[i + 1] -= factor * right[i]
    solution = [right[-1] / diagonal[-1]]
    for i in range(len(beside) - 1, -1, -1):
        solution.append((right[i] - beside[i] * solution[-1]) / diagonal[i])
    return solution[::-1]


def _not_falling(heights: Sequence[float]) -> list[float]:
    """Replace falling stretches by their means, and negative heights by 0."""
    pools: list[tuple[float, int]] = []
    for height in heights:
        mean, count = max(height, 0.0), 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
