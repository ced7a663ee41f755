"""Process groups for pipelines, made and connected in one order on every rank.

What hangs at the start of a job: ranks that make groups in different orders, ranks that never came,
and communicators that are made at the first transfer between two ranks, when their neighbours wait
for others. So all ranks first compare what they are about to make, with a limit that names who is
missing; then they make the groups in the order given; then every pair of ranks exchanges a message,
in the order of the pairs. A rank waits only for pairs before its own, so none waits in a circle.

    groups = make_pipeline_groups([[0, 2], [1, 3]], timeout_s=60)
    executor = PipelineExecutor(..., forward_group=groups.forward, backward_group=groups.backward)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comm_collectives import all_gather, isend_tensors, recv_tensors
from moe_pipeline._checks import check_finite, check_type
from moe_pipeline.errors import MoEValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGroups:
    """The two groups of this rank's pipeline, one per direction; None on ranks without one."""

    forward: ProcessGroup | None
    backward: ProcessGroup | None


def make_pipeline_groups(pipelines: Sequence[Sequence[int]], *, timeout_s: float) -> PipelineGroups:
    """Make and connect the groups of all pipelines. Collective over all ranks of the job.

    Args:
        pipelines: for each pipeline the global ranks of its schedule's rows, ascending, as torch
            numbers a group's ranks; the same on every rank. A rank may be in none, or in one.
        timeout_s: limit of each exchange here, and of the groups afterwards.

    Raises:
        ValueError: a rank is in two pipelines or twice in one, or a pipeline empty or not
            ascending; or the ranks gave different pipelines (raised on every rank).
        CommError: a rank did not come within the limit, or died; names it.
    """
    check_finite("timeout_s", timeout_s)
    check_type("pipelines", pipelines, Sequence)
    for ranks in pipelines:
        check_type("a pipeline", ranks, Sequence)
    members = [rank for ranks in pipelines for rank in ranks]
    if len(set(members)) != len(members):
        twice = sorted({rank for rank in members if members.count(rank) > 1})
        raise MoEValueError(
            f"ranks {twice} occur twice in pipelines={[list(p) for p in pipelines]}"
        )
    for ranks in pipelines:
        if not ranks:
            raise MoEValueError(f"a pipeline is empty in pipelines={[list(p) for p in pipelines]}")
        if list(ranks) != sorted(ranks):
            raise MoEValueError(
                f"pipeline {list(ranks)} is not in ascending order, in which torch numbers the "
                "ranks of a group; let the schedule's rows follow the ranks"
            )
    _agree(pipelines, timeout_s)
    mine = PipelineGroups(forward=None, backward=None)
    for ranks in pipelines:
        limit = timedelta(seconds=timeout_s)
        forward = dist.new_group(list(ranks), timeout=limit)
        backward = dist.new_group(list(ranks), timeout=limit)
        # On other ranks they are no groups.
        if isinstance(forward, ProcessGroup) and isinstance(backward, ProcessGroup):
            mine = PipelineGroups(forward=forward, backward=backward)
    for group in (mine.forward, mine.backward):
        if group is not None:
            connect_pairs(group, timeout_s=timeout_s)
    return mine


def connect_pairs(group: ProcessGroup, *, timeout_s: float) -> None:
    """Let every pair of ranks exchange a message, in one order. Collective over the group.

    For groups made elsewhere: afterwards no transfer has to make a connection.

    Raises:
        CommError: a rank did not come within the limit, or died; names both ends.
    """
    me = dist.get_rank(group)
    for pair in combinations(range(dist.get_world_size(group)), 2):
        if me not in pair:
            continue
        peer = pair[1] if me == pair[0] else pair[0]
        if me < peer:
            isend_tensors([], dst=peer, group=group, timeout_s=timeout_s).wait()
            recv_tensors(src=peer, group=group, timeout_s=timeout_s)
        else:
            recv_tensors(src=peer, group=group, timeout_s=timeout_s)
            isend_tensors([], dst=peer, group=group, timeout_s=timeout_s).wait()


def _agree(pipelines: Sequence[Sequence[int]], timeout_s: float) -> None:
    text = repr([list(ranks) for ranks in pipelines])
    digest = torch.tensor([list(hashlib.sha256(text.encode()).digest())], dtype=torch.uint8)
    digests = all_gather(digest, timeout_s=timeout_s)
    others = [rank for rank in range(len(digests)) if digests[rank].ne(digests[0]).any()]
    if others:
        raise MoEValueError(
            f"ranks {others} gave other pipelines than rank 0; rank {dist.get_rank()} gave {text}; "
            "give the same ones, in the same order, on every rank"
        )
