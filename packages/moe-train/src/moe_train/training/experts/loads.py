"""How many rows each expert has got, and where experts should lie so that ranks get alike.

Experts of a rank are neighbours, so a layer's parts are found by where the row of its experts is
cut: the busiest rank gets as few rows as any cuts allow under which no rank holds more than twice
its equal share, which bounds its memory, and each holds one.

    loads = ExpertLoads()
    loads.add(result.load_LE)                           # after each step
    loads.balanced(config.parallel, model)              # its expert_parts are ("1: 3,5,4,4", ...)

Invariant: the counts are sums over all ranks, so that every rank finds the same parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe_train.config import Config, ParallelConfig
from moe_train.errors import TrainValueError
from moe_train.model import DecoderConfig

_MOST_SHARES = 2


@dataclass(slots=True)
class ExpertLoads:
    """Routed rows of each layer and expert since the layout changed last."""

    rows_LE: list[list[int]] = field(default_factory=list)

    def add(self, load_LE: Sequence[Sequence[int]]) -> None:
        """Add those of a step."""
        if not self.rows_LE:
            self.rows_LE = [list(row) for row in load_LE]
            return
        for row, more in zip(self.rows_LE, load_LE, strict=True):
            row[:] = [n + m for n, m in zip(row, more, strict=True)]

    def clear(self) -> None:
        """Count anew."""
        self.rows_LE = []

    def balanced(self, parallel: ParallelConfig, model: DecoderConfig) -> ParallelConfig:
        """The same layout with parts of each layer that follow its rows."""
        nothing = [0] * model.num_experts
        texts = []
        for layer in _sparse_layers(model):
            rows_E = self.rows_LE[layer] if self.rows_LE else nothing
            texts.append(f"{layer}: {','.join(map(str, balanced_parts(rows_E, parallel.ep)))}")
        return replace(parallel, expert_parts=tuple(texts))

    def imbalance(self, parallel: ParallelConfig) -> float:
        """The rows of the busiest rank, summed over layers, over those of the mean one; 1 of none.

        Args:
            parallel: where experts lie.
        """
        parts, ranks = parallel.parts_by_layer(range(len(self.rows_LE))), parallel.ep
        busiest = total = 0
        for layer, row in enumerate(self.rows_LE):
            sums = _sums(row, parts.get(layer) or _even_parts(len(row), ranks))
            busiest, total = busiest + max(sums), total + sum(sums)
        return busiest * ranks / total if total else 1.0


def expert_parts(config: Config, model: DecoderConfig) -> dict[int, tuple[int, ...]]:
    """The experts of each rank along ep, of the layers that do not have equal parts; pure.

    Raises:
        ValueError: a layer is named that has no experts.
    """
    layers = _sparse_layers(model)
    if idle := sorted(config.parallel.layers_with_parts - set(layers)):
        raise TrainValueError(
            f"parallel.expert_parts names layer {idle[0]}, which has no experts; those that have "
            f"are {', '.join(map(str, layers))}"
        )
    return config.parallel.parts_by_layer(layers)


def _sparse_layers(model: DecoderConfig) -> list[int]:
    count = model.num_hidden_layers + len(model.mtp_layers)
    return [layer for layer in range(count) if model.is_sparse(layer)]


def balanced_parts(rows_E: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Numbers of neighbouring experts for each rank, so that the busiest has fewest rows.

    As even as can be where no expert has got any.
    """
    if not any(rows_E):
        return _even_parts(len(rows_E), ranks)
    most = max(1, -(-_MOST_SHARES * len(rows_E) // ranks))
    low, high = max(rows_E), sum(rows_E)
    while low < high:
        middle = (low + high) // 2
        if _filled(rows_E, ranks, middle, most) is None:
            low = middle + 1
        else:
            high = middle
    return _filled(rows_E, ranks, low, most) or _even_parts(len(rows_E), ranks)


def _filled(rows_E: Sequence[int], ranks: int, limit: int, most: int) -> tuple[int, ...] | None:
    """Parts under which no rank has more rows than `limit`, rank by rank as many as go; or None."""
    parts: list[int] = []
    first = 0
    for rank in range(ranks):
        spare = len(rows_E) - first - (ranks - rank - 1)  # each rank that comes holds one
        count = rows = 0
        while count < min(most, spare) and rows + rows_E[first + count] <= limit:
            rows += rows_E[first + count]
            count += 1
        parts.append(count)
        first += count
    return tuple(parts) if first == len(rows_E) else None


def _even_parts(num_experts: int, ranks: int) -> tuple[int, ...]:
    return tuple(num_experts // ranks + (rank < num_experts % ranks) for rank in range(ranks))


def _sums(row: Sequence[int], parts: Sequence[int]) -> list[int]:
    ends, sums = 0, []
    for count in parts:
        sums.append(sum(row[ends : ends + count]))
        ends += count
    return sums
