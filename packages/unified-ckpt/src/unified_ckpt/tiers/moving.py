"""Copies go from node to node: opened under a hidden name, sent, checked, given their names.

move_copies(members, agreement, plan_copies(members.plan, copies))
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files import open_for_write, sync_file
from unified_ckpt.plans.checkpoint import verify_checkpoint
from unified_ckpt.saving.commit import Agreement, Staging, clean_leftovers
from unified_ckpt.tiers.copies import NodeCopy
from unified_ckpt.tiers.members import Members
from unified_ckpt.tiers.plan import Move
from unified_ckpt.tiers.transport import FileStream, Lane, lane_ends, move_lanes


def move_copies(members: Members, agreement: Agreement, moves: Sequence[Move]) -> None:
    """Carry out the moves, the same on all ranks; collective.

    When it returns, every copy is complete on its target, all bytes compared with their checksums.

    Raises:
        SaveError: a copy could not be sent, kept, or came damaged. On every rank.
        SavePeerError: a rank is gone, or did not go on in time.
    """
    if not moves:
        return
    with ExitStack() as stagings:
        arriving: dict[int, Staging] = {}
        with agreement.phase("open copies") as phase:
            for number, move in enumerate(moves):
                if move.target == members.node and members.is_first:
                    arriving[number] = _open_copy(members.folder, move.copy)
                    stagings.callback(arriving[number].close)
            phase.payload = [(number, s.folder.name) for number, s in arriving.items()]
        hidden = {number: name for told in phase.results for number, name in told}
        with agreement.phase("copy"):
            lanes = [
                lane for n, move in enumerate(moves) for lane in _lanes(members, n, move, hidden)
            ]
            move_lanes(lanes, group=members.group, timeout_s=members.timeout_s)
        with agreement.phase("publish"):
            for number, staging in arriving.items():
                _publish_copy(staging, moves[number].copy)


def _lanes(members: Members, number: int, move: Move, hidden: Mapping[int, str]) -> list[Lane]:
    """Return this rank's ends of the lanes of a move."""
    nodes, own = members.plan.nodes, members.folder / move.copy.name
    ends = lane_ends(move.copy.num_bytes, nodes[move.source], nodes[move.target])
    lanes = []
    for sender, receiver, begin, end in ends:
        if members.rank not in (sender, receiver):
            continue
        sends = members.rank == sender
        folder = own if sends else own.with_name(hidden[number])
        stream = FileStream(folder, move.copy.files)
        peer = members.ranks[receiver if sends else sender]
        lanes.append(
            Lane(number=number, stream=stream, begin=begin, end=end, peer=peer, sends=sends)
        )
    return lanes


def _open_copy(folder: Path, copy: NodeCopy) -> Staging:
    """Make the hidden folder and the empty files of a copy that arrives."""
    target = folder / copy.name
    clean_leftovers(target.parent)
    staging = Staging.make(target)
    try:
        FileStream(staging.folder, copy.files).make_files()
    except OSError:
        staging.close()
        raise
    return staging


def _publish_copy(staging: Staging, copy: NodeCopy) -> None:
    """Compare all bytes that came with their checksums, and give the copy its name."""
    for name, _ in copy.files:
        with open_for_write(staging.folder / name) as fd:
            sync_file(fd)
    problems = verify_checkpoint(staging.folder).problems
    if problems:
        raise CorruptCheckpointError(f"the copy {staging.target} came damaged: {problems[0]}")
    staging.publish()
