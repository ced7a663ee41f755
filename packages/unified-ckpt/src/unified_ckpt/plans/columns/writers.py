"""Which holder writes each box: bytes balanced over ranks, and no tensor written from two nodes.

Lone holders write what only they have; then the largest box goes to the least loaded of its
holders. The boxes of one stored tensor are written on one node, the least loaded of those that
hold all of them; where there is none, each box becomes a stored tensor of its own.

    writers = choose_writers(held, ranks, num_ranks=2, nodes=("a", "a"), kept_sharded=mask)
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unified_ckpt.plans.columns.held_boxes import HeldBoxes

_HOLDERS_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writers:
    """Who writes.

    Attributes:
        row: row of the table that writes each box, int64 `[boxes]`.
        rank_bytes: what each rank writes.
        split: tensors whose boxes are stored tensors of their own, bool `[tensors]`.
    """

    row: torch.Tensor
    rank_bytes: tuple[int, ...]
    split: torch.Tensor


def choose_writers(
    held: HeldBoxes,
    rank: torch.Tensor,
    *,
    num_ranks: int,
    nodes: Sequence[str] | None,
    kept_sharded: torch.Tensor,
    written: torch.Tensor,
) -> Writers:
    """Choose the writer of every box.

    Args:
        held: the boxes.
        rank: of each row of the table.
        num_ranks: of the save.
        nodes: name of each rank's node; None where files may have writers of several.
        kept_sharded: tensors whose boxes are stored tensors in any case, bool `[tensors]`.
        written: tensors that are written at all, bool `[tensors]`.
    """
    counts = held.box_start.diff()
    split = kept_sharded & (counts > 1)
    tensor_of = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
    node_of = _numbers(nodes or [""] * num_ranks)
    candidates: dict[int, list[int]] = {}
    if max(node_of, default=0):
        together = written & ~split & (counts > 1)
        candidates = _nodes_of_tensors(held, rank, torch.tensor(node_of), together)
        covered = torch.zeros_like(split)
        covered[torch.tensor(list(candidates), dtype=torch.int64)] = True
        split = split | (together & ~covered)  # no node holds all of one
    load, row = _assign(held, rank, tensor_of, written, (candidates, node_of, num_ranks))
    return Writers(row=row, rank_bytes=tuple(load), split=split)


def _numbers(names: Sequence[str]) -> list[int]:
    known: dict[str, int] = {}
    return [known.setdefault(name, len(known)) for name in names]


def _nodes_of_tensors(
    held: HeldBoxes, rank: torch.Tensor, node_of: torch.Tensor, wanted: torch.Tensor
) -> dict[int, list[int]]:
    """Return the nodes on which all boxes of a tensor are held, where there are some."""
    num_nodes = int(node_of.max()) + 1
    found: dict[int, list[int]] = defaultdict(list)
    tensors = wanted.nonzero().squeeze(1)
    num_boxes = held.box_start.diff()
    begins, ends = (held.holder_start[held.box_start[tensors + i]] for i in (0, 1))
    batch = (ends - begins).cumsum(0) // _HOLDERS_AT_ONCE
    for some in tensors.split(torch.bincount(batch).tolist()):
        boxes, owner = _spread(held.box_start[some], held.box_start[some + 1])
        holders, of_box = _spread(held.holder_start[boxes], held.holder_start[boxes + 1])
        pair = (of_box * num_nodes + node_of[rank[held.holder[holders]]]).unique()
        pair = owner[pair // num_nodes] * num_nodes + pair % num_nodes
        pair, held_there = pair.unique(return_counts=True)
        tensor = some[pair // num_nodes]
        full = held_there == num_boxes[tensor]
        for number, node in zip(
            tensor[full].tolist(), (pair % num_nodes)[full].tolist(), strict=True
        ):
            found[number].append(node)
    return dict(found)


def _spread(begins: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all numbers of some ranges, and which range each one is of."""
    counts = ends - begins
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return begins[owner] + torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner], owner


def _assign(
    held: HeldBoxes,
    rank: torch.Tensor,
    tensor_of: torch.Tensor,
    written: torch.Tensor,
    world: tuple[dict[int, list[int]], list[int], int],
) -> tuple[list[int], torch.Tensor]:
    """Return each rank's bytes, and the row of each box's writer."""
    candidates, node_of, num_ranks = world
    row = held.holder[held.holder_start[:-1]]
    num_holders = held.holder_start.diff()
    is_written = written[tensor_of]
    loads = torch.zeros(num_ranks, dtype=torch.int64)
    for alone in ((num_holders == 1) & is_written).nonzero().squeeze(1).split(_HOLDERS_AT_ONCE):
        loads.index_add_(0, rank[row[alone]], held.box_bytes[alone])
    load: list[int] = loads.tolist()
    node_load = [0] * (max(node_of, default=0) + 1)
    for node, num_bytes in zip(node_of, load, strict=True):
        node_load[node] += num_bytes
    open_boxes = ((num_holders > 1) & is_written).nonzero().squeeze(1)
    open_boxes = open_boxes[(-held.box_bytes[open_boxes]).argsort(stable=True)]
    chosen_node: dict[int, int] = {}
    batch_of = num_holders[open_boxes].cumsum(0) // _HOLDERS_AT_ONCE
    for batch in open_boxes.split(torch.bincount(batch_of).tolist()):
        taken = []
        for tensor, num_bytes, ranks in _holders(held, rank, tensor_of, batch):
            allowed = ranks
            if tensor in candidates:
                if tensor not in chosen_node:
                    chosen_node[tensor] = min(candidates[tensor], key=node_load.__getitem__)
                allowed = [r for r in ranks if node_of[r] == chosen_node[tensor]]
            writer = min(allowed, key=load.__getitem__)  # the lowest rank where loads are equal
            load[writer] += num_bytes
            node_load[node_of[writer]] += num_bytes
            taken.append(ranks.index(writer))
        places = torch.tensor(taken, dtype=torch.int64)
        row[batch] = held.holder[held.holder_start[batch] + places]
    return load, row


def _holders(
    held: HeldBoxes, rank: torch.Tensor, tensor_of: torch.Tensor, boxes: torch.Tensor
) -> "list[tuple[int, int, list[int]]]":
    """Return tensor, bytes and ranks of some boxes."""
    holders, _ = _spread(held.holder_start[boxes], held.holder_start[boxes + 1])
    ranks = rank[held.holder[holders]].tolist()
    counts = held.holder_start.diff()[boxes]
    ends = counts.cumsum(0)
    return [
        (tensor, num_bytes, ranks[end - count : end])
        for tensor, num_bytes, end, count in zip(
            tensor_of[boxes].tolist(),
            held.box_bytes[boxes].tolist(),
            ends.tolist(),
            counts.tolist(),
            strict=True,
        )
    ]
