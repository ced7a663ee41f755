"""Who writes which bytes of which file: pure data, computed identically on every rank.

Every box is written once, by one of the ranks that hold it, so that bytes are balanced over ranks.
A stored tensor that one rank can write whole goes into a file of that rank alone; a stored tensor
that is split over ranks goes into a file that several ranks write at their own byte ranges. No file
has writers of two nodes: a tensor that no node holds all of is stored in boxes (see `writers`).

The plan is columns of numbers; what a rank needs of its own files is made when it asks.

    plan = plan_save([{"model": [meta]}])  # one list of boxes per rank and part
    plan.files[0].name == "model.safetensors"
"""

import itertools
import json
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import BoxMeta
from unified_ckpt.plans.columns import BoxTable, HeldBoxes, Writers, choose_writers, encode_boxes
from unified_ckpt.plans.file_plan import FilePlan, StoredColumns

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
DEFAULT_CHUNK_BYTES = 16 * 1024 * 1024
_SPREAD_AT_ONCE = 16_384


@dataclass(frozen=True, kw_only=True, eq=False)
class SavePlan:
    """All files of a save; `rank_bytes` is what each rank writes.

    Attributes:
        start: where each file begins among the stored tensors; the last one is the end of all.
        parts: number of each file's part.
        tensor_bytes: of each file.
        owners: who writes each file's header.
        writer_start: where each file's ranks begin in `writer_ranks`, as `start`.
        writer_ranks: the ranks that write tensors of a file, file by file.
        made: the files that ranks have asked for.
    """

    rank_bytes: tuple[int, ...]
    chunk_bytes: int
    columns: StoredColumns = field(repr=False)
    start: Sequence[int] = field(repr=False)
    parts: Sequence[int] = field(repr=False)
    tensor_bytes: Sequence[int] = field(repr=False)
    owners: Sequence[int] = field(repr=False)
    writer_start: Sequence[int] = field(repr=False)
    writer_ranks: Sequence[int] = field(repr=False)
    made: dict[int, list[FilePlan]] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        names = []
        for part, files in itertools.groupby(self.parts):
            name, count = self.columns.table.parts[part], len([*files])
            if count == 1:
                names.append(f"{name}.safetensors")
            else:
                names += [f"{name}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        return names

    @property
    def num_tensors(self) -> list[int]:
        """Number of stored tensors of each file."""
        return [end - begin for begin, end in itertools.pairwise(self.start)]

    @cached_property
    def files(self) -> tuple[FilePlan, ...]:
        """All files."""
        return tuple(itertools.starmap(self._file, enumerate(self.names)))

    def files_of(self, rank: int) -> list[FilePlan]:
        """Return the files that a rank writes to, or only the header of."""
        if rank not in self.made:
            self.made[rank] = [
                self._file(number, name)
                for number, name in enumerate(self.names)
                if self.owners[number] == rank or rank in self._writers(number)
            ]
        return self.made[rank]

    def _writers(self, number: int) -> Sequence[int]:
        return self.writer_ranks[self.writer_start[number] : self.writer_start[number + 1]]

    def _file(self, number: int, name: str) -> FilePlan:
        begin, end = self.start[number], self.start[number + 1]
        return FilePlan(
            name=name,
            part=self.columns.table.parts[self.parts[number]],
            owner=self.owners[number],
            writers=frozenset(self._writers(number)),
            tensor_bytes=self.tensor_bytes[number],
            num_tensors=end - begin,
            chunk_bytes=self.chunk_bytes,
            columns=self.columns,
            place=(begin, end),
        )

    @property
    def index_names(self) -> list[str]:
        """Names of the `.index.json` of parts in several files."""
        counts = [(part, len([*files])) for part, files in itertools.groupby(self.parts)]
        return [
            f"{self.columns.table.parts[part]}.safetensors.index.json"
            for part, count in counts
            if count > 1
        ]

    def weight_map(self, part: str) -> dict[str, str]:
        """Return the file of each stored tensor of a part, by key in order."""
        found: dict[str, str] = {}
        for number, name in enumerate(self.names):
            if self.columns.table.parts[self.parts[number]] == part:
                keys = self.columns.keys(self.start[number], self.start[number + 1])
                found.update(dict.fromkeys(keys, name))
        return dict(sorted(found.items()))

    def weight_maps(self) -> dict[str, dict[str, str]]:
        """Return `weight_map` of each part."""
        return {part: self.weight_map(part) for part in self.columns.table.parts}

    @property
    def indexes(self) -> dict[str, bytes]:
        """The bytes of each `.index.json` by name, as transformers writes them."""
        parts = [name.removesuffix(".safetensors.index.json") for name in self.index_names]
        return {
            name: _index(self.weight_map(part), self._part_bytes(part))
            for name, part in zip(self.index_names, parts, strict=True)
        }

    def _part_bytes(self, part: str) -> int:
        number = self.columns.table.parts.index(part)
        return sum(n for n, of in zip(self.tensor_bytes, self.parts, strict=True) if of == number)


def plan_save(
    held: Sequence[Mapping[str, Sequence[BoxMeta]]] | BoxTable,
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    kept_sharded: Mapping[str, Collection[str] | None] | None = None,
    excluded: Mapping[str, Collection[str]] | None = None,
    nodes: Sequence[str] | None = None,
) -> SavePlan:
    """Plan a save from what each rank holds (`held[rank][part]`, boxes in the rank's own order).

    A file holds at most `max_shard_bytes` of tensors unless one tensor alone is larger. A piece,
    the unit of checksums, has at most `chunk_bytes`.

    Args:
        held: the boxes, or the table of them.
        kept_sharded: by part, tensors whose boxes become stored tensors of their own (`split_key`);
            None for all of the part.
        excluded: by part, tensors that are checked but not written.
        nodes: each rank's node; no file has writers of two. None: files may have any writers.

    Raises:
        CheckpointValueError: ranks disagree about a tensor, boxes overlap, or a tensor has a hole.
    """
    if max_shard_bytes < 1 or chunk_bytes < 1:
        raise CheckpointValueError(
            f"max_shard_bytes={max_shard_bytes}, chunk_bytes={chunk_bytes}: both must be at least 1"
        )
    table = held if isinstance(held, BoxTable) else BoxTable.of(map(encode_boxes, held))
    boxes = HeldBoxes.of(table)
    written = ~_mask(table, excluded or {})
    writers = choose_writers(
        boxes,
        table.rank,
        num_ranks=table.num_ranks,
        nodes=nodes,
        kept_sharded=_mask(table, kept_sharded or {}),
        written=written,
    )
    stored = _stored(table, boxes, writers, written)
    del boxes
    return _files(stored, max_shard_bytes, chunk_bytes)


def _mask(table: BoxTable, keys: Mapping[str, Collection[str] | None]) -> torch.Tensor:
    """Mark tensors by part and key, bool `[tensors]`."""
    marks: list[bool] = []
    for part in table.parts:
        of_part, wanted = table.keys_of(part), keys.get(part, ())
        if wanted is None or not wanted:
            marks += [wanted is None] * len(of_part)
        else:
            marks += [key in wanted for key in of_part]
    return torch.tensor(marks, dtype=torch.bool)


def _stored(
    table: BoxTable, held: HeldBoxes, writers: Writers, written: torch.Tensor
) -> StoredColumns:
    """Return the stored tensors in the order of tensors and boxes."""
    tensors = written.nonzero().squeeze(1)
    counts = held.box_start.diff()[tensors]
    num_stored = torch.where(writers.split[tensors], counts, 1)
    total = int(num_stored.sum())
    tensor, first, end = (torch.empty(total, dtype=torch.int32) for _ in range(3))
    size = torch.empty(total, dtype=torch.int64)
    ends = num_stored.cumsum(0)
    for at in range(0, total, _SPREAD_AT_ONCE):  # in steps, for the memory
        step = torch.arange(at, min(at + _SPREAD_AT_ONCE, total))
        number = torch.searchsorted(ends, step, right=True)
        of, here = tensors[number], slice(at, at + len(step))
        boxed = writers.split[of]
        begin = held.box_start[of] + step - (ends - num_stored)[number]
        tensor[here], first[here] = of, begin
        end[here] = torch.where(boxed, begin + 1, held.box_start[of + 1])
        size[here] = held.num_bytes[of]
        size[here][boxed] = held.box_bytes[begin[boxed]]
    return StoredColumns(
        table=table,
        first_row=held.first_row,
        row=held.row,
        writers=writers,
        tensor=tensor,
        first_box=first,
        end_box=end,
        num_bytes=size,
    )


def _files(stored: StoredColumns, max_shard_bytes: int, chunk_bytes: int) -> SavePlan:
    """Put stored tensors of the same first writer, shared or not, into files."""
    table, num_ranks = stored.table, max(stored.table.num_ranks, 1)
    first, shared = _first_writers(stored)
    group = (table.part[stored.tensor] * 2 + shared) * num_ranks + first
    order = group.argsort(stable=True).to(torch.int32)
    stored.put_in_order(order)
    columns, group, first = stored, group[order], first[order]
    start = _cuts(group, columns.num_bytes, max_shard_bytes)
    parts: list[int] = (group[torch.tensor(start, dtype=torch.int64)] // (2 * num_ranks)).tolist()
    for empty in sorted(set(range(len(table.parts))) - set(parts)):  # a file says that it is there
        place = sum(number < empty for number in parts)
        start.insert(place, [*start, len(group)][place])
        parts.insert(place, empty)
    del group, order
    edges = torch.tensor([*start, len(columns.tensor)])
    pairs = _file_writers(columns, edges, num_ranks)
    writer_start = torch.searchsorted(pairs // num_ranks, torch.arange(len(parts) + 1))
    writer_ranks = pairs % num_ranks
    # Without tensors that have bytes, the lowest rank that names the first one writes the header.
    owners = torch.cat([first, torch.zeros(1, dtype=torch.int32)])[edges[:-1]].to(torch.int64)
    has_writer = writer_start.diff() > 0
    owners[has_writer] = writer_ranks[writer_start[:-1][has_writer]]
    total = torch.cat([torch.zeros(1, dtype=torch.int64), columns.num_bytes.cumsum(0)])
    return SavePlan(
        rank_bytes=columns.writers.rank_bytes,
        chunk_bytes=chunk_bytes,
        columns=columns,
        start=edges.tolist(),
        parts=parts,
        tensor_bytes=total[edges].diff().tolist(),
        owners=owners.tolist(),
        writer_start=writer_start.tolist(),
        writer_ranks=writer_ranks.tolist(),
    )


def _first_writers(stored: StoredColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return who writes each stored tensor's first box, and whether others write boxes of it."""
    first = stored.table.rank[stored.first_row[stored.tensor]]
    has_boxes = stored.end_box > stored.first_box
    begins = stored.first_box[has_boxes]
    first[has_boxes] = stored.table.rank[stored.writers.row[begins]]
    shared = torch.zeros_like(first, dtype=torch.bool)
    several = (stored.end_box - stored.first_box > 1).nonzero().squeeze(1)
    for some, box in _boxes_of(stored, several):
        others = stored.table.rank[stored.writers.row[box]] != first[some]
        shared[some[others]] = True
    return first, shared


def _file_writers(stored: StoredColumns, edges: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return each pair of a file and a rank that writes tensors of it, as one sorted number."""
    pairs = [torch.empty(0, dtype=torch.int64)]
    for some, box in _boxes_of(stored, torch.arange(len(stored.tensor))):
        file = torch.searchsorted(edges, some, right=True) - 1
        pairs.append((file * num_ranks + stored.table.rank[stored.writers.row[box]]).unique())
    distinct: torch.Tensor = torch.cat(pairs).unique()
    return distinct


def _boxes_of(
    stored: StoredColumns, numbers: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the boxes of some stored tensors: the number of the tensor, and that of the box."""
    counts = stored.end_box[numbers] - stored.first_box[numbers]
    batch = counts.cumsum(0) // _SPREAD_AT_ONCE
    for some in numbers.split(torch.bincount(batch).tolist()):
        count = stored.end_box[some] - stored.first_box[some]
        owner = torch.arange(len(some)).repeat_interleave(count)
        within = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
        yield some[owner], stored.first_box[some][owner] + within


def _cuts(group: torch.Tensor, num_bytes: torch.Tensor, max_shard_bytes: int) -> list[int]:
    """Return where files begin: with each group, and before what would make one too large."""
    total = torch.cat([torch.zeros(1, dtype=torch.int64), num_bytes.cumsum(0)])
    changes = (group.diff() != 0).nonzero().squeeze(1) + 1
    edges = torch.cat([torch.tensor([0]), changes, torch.tensor([len(group)])])
    starts = []
    for (begin, end), used in zip(
        itertools.pairwise(edges.tolist()), total[edges].diff().tolist(), strict=True
    ):
        at = begin
        while at < end:
            starts.append(at)
            if used <= max_shard_bytes:
                break
            fits = int(torch.searchsorted(total, total[at] + max_shard_bytes, right=True)) - 1
            at = max(fits, at + 1)
    return starts


def _index(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """Write an index as transformers does: every key's file, and the bytes of all tensors."""
    lines = [f"    {json.dumps(key, ensure_ascii=False)}: " for key in weight_map]
    rows = ",\n".join(map(operator.add, lines, map(json.dumps, weight_map.values())))
    head = f'{{\n  "metadata": {{\n    "total_size": {total_bytes}\n  }},\n  "weight_map": {{\n'
    return f"{head}{rows}\n  }}\n}}\n".encode()
