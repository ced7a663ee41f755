"""Weights of several models made one, chunk by chunk.

    for chunk in combine(Combine(method="linear", weights=(0.5, 0.5)), (a, b), dtype, shape):

What a method has to know of a whole tensor (a norm, the k-th largest difference) is found first in
passes of their own, so that no tensor is held. Sums are made in float32, in the order of the
models; norms and products of whole tensors in float64.

The methods are those of the papers under their names: task arithmetic (2212.04089), TIES
(2306.01708), DARE (2311.03099), breadcrumbs (2312.06795), DELLA (2406.11617), model stock
(2403.19522); `_ties` and `della` elect a sign for each weight and drop what is against it.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from weight_convert.compute.elementwise import ranges, rounded
from weight_convert.compute.ranks import Rank, find_rank
from weight_convert.compute.reading import TensorReader
from weight_convert.operations import Combine

CHUNK_ELEMENTS = Combine.CHUNK_ELEMENTS
_PARALLEL = 0.9995  # the cosine above which an arc is a line
_ELECTING = frozenset({"ties", "dare_ties", "breadcrumbs_ties", "della"})


def combine(
    operation: Combine,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """One weight of several."""
    step = min(CHUNK_ELEMENTS, most)
    if operation.method == "linear":
        chunks = _weighted(inputs, _shares(operation), step)
    elif operation.method == "slerp":
        chunks = _weighted(inputs, _on_arc(inputs, operation.weights[1], step), step)
    elif operation.method == "model_stock":
        chunks = _weighted(inputs, _stock(inputs, step), step)
    else:
        chunks = _with_differences(operation, inputs, step)
    for values in chunks:
        yield rounded(values, dtype, inputs[0].key)


def _shares(operation: Combine) -> tuple[float, ...]:
    total = math.fsum(operation.weights) if operation.normalize else 1.0
    return tuple(weight / total for weight in operation.weights)


def _chunks(inputs: Sequence[TensorReader], step: int) -> Iterator[list[torch.Tensor]]:
    """The same range of all inputs, in float32."""
    for begin, count in ranges(inputs[0].num_elements, step):
        yield [source.read(begin, count).to(torch.float32) for source in inputs]


def _weighted(
    inputs: Sequence[TensorReader], weights: Sequence[float], step: int
) -> Iterator[torch.Tensor]:
    """The weighted sum; both buffers serve all chunks, since fresh memory costs page faults."""
    held = min(step, inputs[0].num_elements)
    sums, terms = torch.empty(held), torch.empty(held)
    for begin, count in ranges(inputs[0].num_elements, step):
        total, term = sums[:count].zero_(), terms[:count]
        for source, weight in zip(inputs, weights, strict=True):
            total.add_(term.copy_(source.read_over(begin, count)).mul_(weight))
        yield total


def _products(inputs: Sequence[TensorReader], base: bool, step: int) -> torch.Tensor:
    """Inner products of all pairs of inputs, or of their differences from the first one."""
    size = len(inputs) - base
    products = torch.zeros(size, size, dtype=torch.float64)
    for first, *values in _chunks(inputs, step):
        rows = torch.stack([value - first for value in values] if base else [first, *values])
        wide = rows.to(torch.float64)
        products += wide @ wide.T
    return products


def _on_arc(inputs: Sequence[TensorReader], t: float, step: int) -> tuple[float, float]:
    """The weights of two tensors at `t` of the way between their directions."""
    products = _products(inputs, base=False, step=step)
    norms = products.diag().sqrt()
    both = float(norms[0] * norms[1])
    cosine = float(products[0, 1]) / both if both > 0 else 1.0
    if abs(cosine) > _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _stock(inputs: Sequence[TensorReader], step: int) -> tuple[float, ...]:
    """Weights of the base and of the models by the mean cosine between the models' differences."""
    products = _products(inputs, base=True, step=step)
    number = len(products)
    norms = products.diag().sqrt()
    pairs = [(i, j) for i in range(number) for j in range(i)]
    scales = [float(norms[i] * norms[j]) for i, j in pairs]
    cosines = [
        float(products[pair]) / scale if scale > 0 else 0.0
        for pair, scale in zip(pairs, scales, strict=True)
    ]
    cosine = max(-1.0, min(1.0, math.fsum(cosines) / len(cosines)))
    below = 1 + (number - 1) * cosine
    share = number * cosine / below if below else 0.0
    return (1 - share, *(share / number for _ in range(number)))


def _with_differences(
    operation: Combine, inputs: Sequence[TensorReader], step: int
) -> Iterator[torch.Tensor]:
    """The base plus what is left of each model's difference from it."""
    base, *models = inputs
    masks = [_mask(operation, number, (base, model), step) for number, model in enumerate(models)]
    weights = operation.weights
    total_weight = math.fsum(weights)
    for begin, count in _row_ranges(operation, base, step):
        first = base.read(begin, count).to(torch.float32)
        parts = [
            mask.thin(model.read(begin, count).to(torch.float32) - first).mul_(weight)
            for model, mask, weight in zip(models, masks, weights, strict=True)
        ]
        if operation.method in _ELECTING:
            change = _elected(parts, weights, operation.normalize)
        else:
            change = sum(parts[1:], parts[0])
            if operation.normalize and abs(total_weight) > 1e-8:
                change /= total_weight
        yield first.add_(change.mul_(operation.scale))


def _elected(
    parts: Sequence[torch.Tensor], weights: Sequence[float], normalize: bool
) -> torch.Tensor:
    """The sum of those parts that have the sign of the sum of all."""
    stacked = torch.stack(list(parts))
    sign = torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    agree = stacked.sign() == sign
    change = (stacked * agree).sum(0)
    if normalize:
        share = (torch.tensor(weights)[:, None] * agree).sum(0)
        change /= torch.where(share.abs() < 1e-8, 1.0, share)
    return change


def _row_ranges(operation: Combine, base: TensorReader, step: int) -> Iterator[tuple[int, int]]:
    """Chunks; whole rows for `della`, which ranks the differences of a row."""
    if not operation.method.startswith("della"):
        return ranges(base.num_elements, step)
    columns = max(1, base.num_columns)
    return ranges(base.num_elements, max(1, step // columns) * columns)


class _Mask:
    """Thins the differences of one model, chunk after chunk."""

    def thin(self, difference: torch.Tensor) -> torch.Tensor:
        """What is left of the next chunk."""
        return difference


class _Ranked(_Mask):
    """Keeps those between two ranks by magnitude."""

    def __init__(self, upper: Rank, lower: Rank) -> None:
        self._upper, self._lower = upper, lower

    def thin(self, difference: torch.Tensor) -> torch.Tensor:
        """Zero what is above the upper rank or below the lower one."""
        keep = self._lower.above(difference) & ~self._upper.above(difference)
        return difference.mul_(keep)


class _Drawn(_Mask):
    """Keeps each with a probability, and scales what is kept by its inverse."""

    def __init__(self, density: float, seed: int) -> None:
        self._density = density
        self._generator = torch.Generator().manual_seed(seed)

    def probability(self, difference: torch.Tensor) -> torch.Tensor | float:
        """Of each to be kept."""
        return self._density

    def thin(self, difference: torch.Tensor) -> torch.Tensor:
        """Draw."""
        drawn = torch.rand(difference.shape, generator=self._generator)
        kept = self.probability(difference)
        return torch.where(drawn < kept, difference / kept, 0.0)


class _DrawnByRank(_Drawn):
    """The same with a probability that rises with the rank in the row."""

    def __init__(self, density: float, seed: int, epsilon: float, columns: int) -> None:
        super().__init__(density, seed)
        self._epsilon = min(epsilon, density, 1 - density)  # so that none is beyond 0 or 1
        self._columns = columns

    def probability(self, difference: torch.Tensor) -> torch.Tensor | float:
        """From density - epsilon for the smallest of a row to density + epsilon."""
        if self._columns < 2:
            return self._density
        rows = difference.abs().view(-1, self._columns)
        ranks = rows.argsort(dim=1, stable=True).argsort(dim=1)
        share = ranks.to(torch.float32) / (self._columns - 1)
        return (self._density - self._epsilon + 2 * self._epsilon * share).view(-1)


def _mask(
    operation: Combine, number: int, pair: tuple[TensorReader, TensorReader], step: int
) -> _Mask:
    base, _ = pair
    method, density = operation.method, operation.densities[number]
    if method.startswith("dare"):
        return _Drawn(density, operation.seed + number)
    if method.startswith("della"):
        columns = base.num_columns
        return _DrawnByRank(density, operation.seed + number, operation.epsilon, columns)
    if method == "task_arithmetic":
        return _Mask()
    total = base.num_elements
    top = int(operation.gamma * total) if method.startswith("breadcrumbs") else 0
    kept = int(density * total)
    top = max(0, min(top, total - kept))

    def differences() -> Iterator[torch.Tensor]:
        for first, values in _chunks(pair, step):
            yield values - first

    return _Ranked(find_rank(differences, top), find_rank(differences, top + kept))
