"""A node's own copy: its ranks save what they hold, once all nodes have room for two generations.

report = save_own(members, agreement, copy, make)
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unified_ckpt.errors import CheckpointValueError, SaveError
from unified_ckpt.files import free_bytes
from unified_ckpt.geometry import Box, Shard
from unified_ckpt.plans import split_key
from unified_ckpt.saving import Request, SaveReport, save_request
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.tiers.copies import COPY_FILE, NodeCopy, held_copies
from unified_ckpt.tiers.members import Members

_GENERATIONS = 2  # the last state, and the next one while it is saved

MakeRequest = Callable[[Path], Request]


def save_own(
    members: Members,
    agreement: Agreement,
    own: NodeCopy,
    make: MakeRequest,
    *,
    max_bytes: int | None = None,
) -> SaveReport:
    """Save what the ranks of this node hold; collective over all nodes.

    Raises:
        SaveError: some node has no room; nothing was written then. On every rank.
        SaveError: a rank of this node failed. On every rank of it.
    """
    target, asked = members.folder / own.name, False

    def request() -> Request:
        made = make(target)
        if COPY_FILE in {*made.files, *made.rank_files}:
            raise CheckpointValueError(f"file {COPY_FILE!r} is the tier's; use another name")
        parts = {part: boxes_apart(shards) for part, shards in made.parts.items()}
        told = json.dumps(own.to_json()).encode()
        return replace(made, target=target, parts=parts, files={**made.files, COPY_FILE: told})

    def admit(num_bytes: int) -> None:
        nonlocal asked
        asked = True
        _check_room(members, agreement, num_bytes, max_bytes)

    try:
        return save_request(
            request,
            group=members.node_group,
            admit=admit,
            subject=f"save of node {members.plan.names[members.node]!r}",
            timeout_s=members.timeout_s,
        )
    except SaveError as error:
        if not asked:  # the other nodes wait there
            with suppress(SaveError), agreement.phase("room"):
                raise SaveError(str(error)) from error
        raise


def _check_room(
    members: Members, agreement: Agreement, num_bytes: int, max_bytes: int | None
) -> None:
    """Refuse, on every rank, what some node has no room for."""
    with agreement.phase("room") as phase:
        phase.payload = [num_bytes, _room(members.folder, max_bytes) if members.is_first else 0]
    told, plan = members.by_node(phase.results), members.plan
    for node, (own, room) in enumerate(told):
        others = sum(told[kept][0] for kept in plan.kept_by(node))
        needed = _GENERATIONS * (own + others)
        if needed > room:
            raise SaveError(
                f"node {plan.names[node]!r} has room for {room} bytes in the folder of its tier, "
                f"but {_GENERATIONS} generations of its own state ({own} bytes) and of its copies "
                f"of others ({others} bytes) take {needed}; nothing was written. Give it more room "
                "(max_bytes, a larger tmpfs), or use fewer copies"
            )


def _room(folder: Path, max_bytes: int | None) -> int:
    """Bytes that copies may take in a folder, those that are there included."""
    room = free_bytes(folder) + sum(copy.num_bytes for copy in held_copies(folder))
    return room if max_bytes is None else min(room, max_bytes)


def boxes_apart(shards: Sequence[Shard]) -> list[Shard]:
    """Make every box that is not a whole tensor a stored tensor of its own.

    A node need not hold the rest of it; loads find such boxes (see `split_key`).
    """
    apart = []
    for shard in shards:
        box = shard.box
        if box.local_shape == box.global_shape:
            apart.append(shard)
            continue
        key = split_key(shard.key, box.offset, box.local_shape, box.global_shape)
        whole = replace(Box.whole(box.local_shape), replica_id=box.replica_id)
        apart.append(Shard(key=key, tensor=shard.tensor, box=whole))
    return apart
