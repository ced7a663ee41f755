"""How a tensor is cut: along which dims, for which axis, into which ranges.

A spec gives every tensor a role and its dims names. `column`, `kv` and `vocab` are cut along the
first dim that is not the expert's, `row` along the last one; the dim `expert` is dealt to ep, and
other dims of experts are cut for etp. Attention is cut by whole heads, whose number `config.json`
says: with fewer key heads than ranks each of these is held by several ranks, otherwise queries go
where their keys go. `a+b` are parts that are cut each by itself, `a~b` rows that stay in pairs.

    Cutter(spec, config, SplitLayout(tp=2)).cuts("model.norm.weight", (64,))     # ()

Invariant: the ranges of a cut, those that several ranks hold counted once, tile the dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from weight_convert.cutting.layout import SplitLayout, shares
from weight_convert.errors import WeightConvertError
from weight_convert.specs import EXPERT, FamilySpec, Matcher, Side

_HEADS = ("query", "query_heads", "values", "key_value")  # dims that are cut by heads of queries
_KEYS = "key"
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DimCut:
    """One dim of a tensor, cut.

    Attributes:
        dim: its number.
        axis: "tp", "ep" or "etp".
        ranges: for each place on the axis, the (begin, length) that stand there, one after another.
        padded: the dim's length with the padding, which is zeros behind its end.
    """

    dim: int
    axis: str
    ranges: tuple[tuple[Range, ...], ...]
    padded: int

    def length(self, place: int) -> int:
        """The dim's length at a place."""
        return sum(length for _, length in self.ranges[place])


class Cutter:
    """Cuts the tensors in memory of one model for one layout."""

    def __init__(self, spec: FamilySpec, config: Mapping[str, Any], layout: SplitLayout) -> None:
        self._spec = spec
        self._layout = layout
        self._config = config
        self._names = list(spec.tensors)
        self._matcher = Matcher(
            [Side(names=(name,), groups=()) for name in self._names], spec.companions
        )
        self._has_keys = any(note.role == "kv" for note in spec.tensors.values())

    def is_known(self, key: str) -> bool:
        """Whether the spec names this tensor; others are held whole."""
        return self._matcher.find(key) is not None

    def place_of(self, key: str) -> tuple[int, int]:
        """(part, layer): tensors before (0), in (1) and behind (2) the layers.

        A tensor that the spec does not name is in the layer that its name has, or before all.
        """
        fields = key.split(".")
        for field, number in pairwise(fields):
            if field == "layers" and number.isdecimal():
                return 1, int(number)
        member = self._matcher.find(key)
        in_layers = [n for n, name in enumerate(self._names) if name.startswith("{layer}")]
        behind = member is not None and bool(in_layers) and member.side > in_layers[0]
        return (2 if behind else 0), 0

    def cuts(
        self, key: str, shape: tuple[int, ...], block: tuple[int, ...] | None = None
    ) -> tuple[DimCut, ...]:
        """How the tensor `key` of `shape` is cut; () if every rank holds it whole.

        Args:
            key: name in memory.
            shape: of the whole tensor; of a companion, of the tensor that it belongs to.
            block: elements of each dim that have one scale, for a companion and its tensor: cuts
                lie between blocks, and a companion's ranges count blocks.

        Raises:
            WeightConvertError: a shape that the spec does not have, heads that `config.json` does
                not tell or that blocks cross.
        """
        member = self._matcher.find(key)
        if member is None:
            return ()
        note = self._spec.tensors[self._names[member.side]]
        if note.role == "other":
            return ()
        if len(note.dims) != len(shape):
            raise WeightConvertError(
                f"{key} has shape {list(shape)}, but its spec says [{', '.join(note.dims)}]"
            )
        of_expert = EXPERT in note.dims and note.role in ("column", "row", "norm")
        found: list[DimCut] = []
        if of_expert:
            dim = note.dims.index(EXPERT)
            found.append(self._even(dim, "ep", shape[dim], self._layout.ep, 1))
        inner = [dim for dim, name in enumerate(note.dims) if name != EXPERT]
        if note.role in ("column", "kv", "vocab", "row") and inner:
            dim = inner[-1] if note.role == "row" else inner[0]
            unit = block[dim] if block else 1
            found.append(
                self._inner(key, dim, note.dims[dim], shape[dim], unit, of_expert, note.role)
            )
        if member.suffix and block is not None:
            found = [_in_blocks(cut, block[cut.dim], key) for cut in found]
        return tuple(found)

    def _even(self, dim: int, axis: str, length: int, ranks: int, unit: int) -> DimCut:
        """Shares of a dim in steps of `unit`; the last one ends with the dim."""
        cut = [
            (begin * unit, min(count * unit, max(length - begin * unit, 0)))
            for begin, count in shares(-(-length // unit), ranks)
        ]
        return DimCut(dim=dim, axis=axis, ranges=tuple((one,) for one in cut), padded=length)

    def _inner(
        self, key: str, dim: int, name: str, length: int, unit: int, of_expert: bool, role: str
    ) -> DimCut:
        axis = "etp" if of_expert else "tp"
        ranks = self._layout.etp if of_expert else self._layout.tp
        if "~" in name:
            return self._even(dim, axis, length, ranks, 2 * unit)
        if role == "vocab":
            multiple = self._layout.vocab_multiple * ranks
            padded = -(-length // multiple) * multiple if multiple else length
            return replace(self._even(dim, axis, padded, ranks, unit), padded=padded)
        parts = name.split("+")
        counts = [self._heads(part, key) for part in parts]
        total = sum(count or 1 for count in counts)
        if length % total:
            raise WeightConvertError(
                f"{key}: dim {dim} has {length} elements, which are not {total} equal parts "
                f"({name}, with the heads of config.json)"
            )
        sizes = [length // total * (count or 1) for count in counts]
        begins = [0, *accumulate(sizes)]
        columns = [
            self._even(dim, axis, size, ranks, unit).ranges
            if count is None
            else tuple((one,) for one in self._by_heads(part, size // count, ranks))
            for part, size, count in zip(parts, sizes, counts, strict=True)
        ]
        ranges = tuple(
            tuple(
                (begin + columns[number][rank][0][0], columns[number][rank][0][1])
                for number, begin in enumerate(begins[:-1])
            )
            for rank in range(ranks)
        )
        return DimCut(dim=dim, axis=axis, ranges=ranges, padded=length)

    def _heads(self, part: str, key: str) -> int | None:
        """How many heads a dim has; None if it is not made of heads."""
        if part not in (*_HEADS, _KEYS):
            return None
        heads = self._config.get("num_attention_heads")
        if type(heads) is not int or heads < 1:
            raise WeightConvertError(
                f"{key} is cut by attention heads, and config.json has no num_attention_heads"
            )
        if not self._has_keys:
            return heads
        keys = self._config.get("num_key_value_heads", heads)
        if type(keys) is not int or keys < 1 or heads % keys:
            raise WeightConvertError(
                f"config.json says {heads} num_attention_heads and {keys} num_key_value_heads; "
                f"expected a multiple"
            )
        return keys if part == _KEYS else heads

    def _by_heads(self, part: str, head_size: int, ranks: int) -> list[Range]:
        """Each rank's rows of a dim that is made of heads."""
        heads = self._heads("query", part) or 1
        keys = self._heads(_KEYS, part) or 1
        group = heads // keys
        if keys >= ranks:
            of_keys = shares(keys, ranks)
            of_queries = [(begin * group, count * group) for begin, count in of_keys]
        else:
            mine = [rank * keys // ranks for rank in range(ranks)]
            of_keys = [(key, 1) for key in mine]
            of_queries = []
            for rank, key in enumerate(mine):
                begin, count = shares(group, mine.count(key))[rank - mine.index(key)]
                of_queries.append((key * group + begin, count))
        chosen = of_keys if part == _KEYS else of_queries
        return [(begin * head_size, count * head_size) for begin, count in chosen]


def _in_blocks(cut: DimCut, block: int, key: str) -> DimCut:
    """The same cut of a companion, which has one element a block."""
    end = max(begin + length for ranges in cut.ranges for begin, length in ranges)

    def blocks(begin: int, length: int) -> Range:
        if begin % block or ((begin + length) % block and begin + length != end):
            raise WeightConvertError(
                f"{key}: a cut at {begin} or {begin + length} lies inside a block of {block}, "
                f"which has one scale; choose other degrees, or dequantise first"
            )
        return begin // block, -(-(begin + length) // block) - begin // block

    ranges = tuple(tuple(blocks(*one) for one in ranges) for ranges in cut.ranges)
    return replace(cut, ranges=ranges, padded=-(-cut.padded // block))
