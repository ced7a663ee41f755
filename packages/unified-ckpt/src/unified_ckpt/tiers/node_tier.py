"""The tier of a job's nodes: save on each node, copy to others, and find the nearest copy again.

A save has four steps, each ended by an agreement of all ranks: there is room; each node has its own
copy; all copies have arrived, checked and under their names; the copies before are freed. Whatever
dies when: up to the last step the state before is whole, from then on the new one.

    with NodeTier(TierOptions(folder="/dev/shm/my-run")) as tier:
        found = tier.restore()  # (step, folder) of this rank, or None
        tier.save({"model": model, "optimizer": optimizer}, step=10)
"""

import itertools
import logging
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from unified_ckpt.errors import (
    CheckpointValueError,
    DamagedCheckpointWarning,
    LoadError,
    SaveArgumentError,
    check_type,
)
from unified_ckpt.files import lock_folder, make_folders, remove_tree, unlock_folder
from unified_ckpt.options import SaveOptions
from unified_ckpt.plans.checkpoint import verify_checkpoint
from unified_ckpt.saving import Request, SaveReport, make_request
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.state import StateDict
from unified_ckpt.tiers.copies import NodeCopy, free_copies, held_copies, read_copy
from unified_ckpt.tiers.members import Members
from unified_ckpt.tiers.moving import move_copies
from unified_ckpt.tiers.options import TierOptions
from unified_ckpt.tiers.own_copy import MakeRequest, save_own
from unified_ckpt.tiers.plan import CopyPlan, newest_state, plan_copies, plan_restore

_IN_USE_S = 10.0

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What a save in the tier did, on this node.

    Attributes:
        step: finished steps of the state.
        own: the save of this node's own copy.
        kept_bytes: of the copies of other nodes that came.
    """

    step: int
    own: SaveReport
    kept_bytes: int


class NodeTier(AbstractContextManager["NodeTier"]):
    """This rank's part of the tier; every method but `close` and `clear` is collective.

    The first rank of each node holds a lock on the node's folder. The ranks speak over gloo groups
    of the tier's own, on the host, also where training uses another backend.

    Args:
        options: the node's folder, and how many copies there are.
        group: the ranks, None for all; without process groups this one alone.

    Raises:
        SaveArgumentError: (a ValueError) ranks name other numbers of copies, or ranks of a node
            other folders. On every rank.
        SaveError: a folder is in use by another process, or by another node. On every rank.
    """

    def __init__(self, options: TierOptions, *, group: dist.ProcessGroup | None = None) -> None:
        check_type("options", options, TierOptions)
        self.options = options
        self._members = Members.meet(options, group=group)
        self._folder = options.path
        self._lock_fd = -1
        with ExitStack() as undo:
            undo.callback(self.close)
            agreement = self._members.agreement("open")
            with agreement.phase("lock"):
                if self._members.is_first:
                    make_folders(self._folder)
                    self._lock_fd = _lock(self._folder)
            held = self._held(agreement)
            self._state = newest_state(held, world_size=self.plan.world_size)
            undo.pop_all()

    @property
    def plan(self) -> CopyPlan:
        """The nodes, and which keeps copies of which."""
        return self._members.plan

    def save(
        self,
        state_dict: StateDict,
        step: int,
        *,
        files: Mapping[str, bytes] | None = None,
        rank_files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
    ) -> TierReport:
        """Save the state after `step` steps on the nodes, with its copies; collective.

        When it returns, all copies are complete, and those of the state before are gone. Tied
        tensors are stored on every node that has them.

        Args:
            state_dict: as in `save`.
            step: the number of finished steps, the same on all ranks.
            files: more files by name, written by the first rank of every node (of others ignored).
            rank_files, options: as in `save`.

        Raises:
            SaveArgumentError: as `save`; or the ranks name different steps.
            SavePeerError: a rank did not arrive in time, or is gone.
            SaveError: two generations have no room, or some rank failed; the state before is whole.
        """
        apart = replace(options or SaveOptions(), tied={})

        def make(target: Path) -> Request:
            return make_request(
                state_dict,
                checkpoint_id=target,
                options=apart,
                files=files,
                rank_files=rank_files,
            )

        return self.save_made(make, step)

    def save_made(self, make: MakeRequest, step: int) -> TierReport:
        """As `save`, of a request that `make` returns for the folder that it is given."""
        members = self._members
        agreement = members.agreement(f"save({step})")
        own = self._begin(agreement, step)
        with agreement.phase("save", checks_arguments=True) as phase:
            limit = self.options.max_bytes
            report = save_own(members, agreement, own, make, max_bytes=limit)
            if members.is_first:
                phase.payload = read_copy(self._folder / own.name).to_json()
        copies = [NodeCopy.from_json(fields) for fields in members.by_node(phase.results)]
        move_copies(members, agreement, plan_copies(self.plan, copies))
        self._state = (own.step, own.token)
        self._free()
        kept = sum(copies[node].num_bytes for node in self.plan.kept_by(members.node))
        return TierReport(step=own.step, own=report, kept_bytes=kept)

    def _begin(self, agreement: Agreement, step: int) -> NodeCopy:
        """Agree about step and token; free what saves that failed have left."""
        with agreement.phase("begin", checks_arguments=True) as phase:
            check_type("step", step, int)
            if step < 0:
                raise CheckpointValueError(f"step={step} is negative; count steps from 0")
            removed = self._free()
            if removed:
                logger.warning("tier: removed %d unfinished copies in %s", removed, self._folder)
            phase.payload = [step, secrets.token_hex(8)]
        steps = [found for found, _ in phase.results]
        if len(set(steps)) > 1:
            raise SaveArgumentError(f"{agreement.subject}: ranks save different steps: {steps}")
        return NodeCopy(
            step=step,
            token=phase.results[0][1],
            ranks=self.plan.nodes[self._members.node],
            world_size=self.plan.world_size,
        )

    def restore(self, *, at_least: int = 0) -> tuple[int, Path] | None:
        """Bring the newest whole state to the nodes that need it; collective.

        Nodes may be others than those that saved, and hold nothing. Each gets from others what it
        lacks of its own ranks, and of those whose copies it keeps. Every byte is compared with its
        checksum first; a damaged copy is removed, with a `DamagedCheckpointWarning`, and another
        node's taken.

        Args:
            at_least: the least step that is of use, for example that of the newest checkpoint in
                storage; the same on all ranks.

        Returns:
            The step, and the folder of the copy that holds this rank's state (`load` reads it under
            the layout that was saved); None if the nodes have no whole state of so many ranks.

        Raises:
            SaveError: a node cannot read its folder, or a copy could not be sent. On every rank.
        """
        agreement = self._members.agreement("restore")
        while True:
            held = self._held(agreement)
            state = newest_state(held, world_size=self.plan.world_size, at_least=at_least)
            if state is None:
                self._say_others(held, at_least)
                return None
            held = {
                node: [copy for copy in copies if (copy.step, copy.token) == state]
                for node, copies in held.items()
            }
            if self._remove_damaged(agreement, held):
                continue
            self._state = state
            move_copies(self._members, agreement, plan_restore(self.plan, held))
            rank, copies = self._members.rank, itertools.chain(*held.values())
            mine = next(copy for copy in copies if rank in copy.ranks)
            return state[0], self._folder / mine.name

    def resume(
        self, load_one: Callable[[Path], _T], *, at_least: int = 0
    ) -> tuple[Path, _T] | None:
        """Restore and load; None, with a warning, if a rank cannot load its copy; collective.

        Args:
            load_one: loads this rank's state from a folder, for example with `load`.
            at_least: as in `restore`.

        Raises:
            SaveError: as `restore`; or `load_one` failed for another reason than its source.
        """
        found = self.restore(at_least=at_least)
        if found is None:
            return None
        agreement = self._members.agreement("resume")
        loaded: list[_T] = []
        with agreement.phase("load") as phase:
            try:
                loaded.append(load_one(found[1]))
            except LoadError as error:
                phase.payload = str(error)
        failed = {rank: text for rank, text in enumerate(phase.results) if text is not None}
        if not failed:
            return found[1], loaded[0]
        rank, text = next(iter(failed.items()))
        warnings.warn(
            f"step {found[0]} of the tier cannot be loaded, storage is read instead: "
            f"rank {self._members.ranks[rank]}: {text} (the tier serves the layout that saved)",
            DamagedCheckpointWarning,
            stacklevel=2,
        )
        return None

    def _held(self, agreement: Agreement) -> dict[int, list[NodeCopy]]:
        """Return what lies on each node."""
        with agreement.phase("list") as phase:
            if self._members.is_first:
                phase.payload = [copy.to_json() for copy in held_copies(self._folder)]
        return {
            node: [NodeCopy.from_json(fields) for fields in told]
            for node, told in enumerate(self._members.by_node(phase.results))
        }

    def _say_others(self, held: Mapping[int, Sequence[NodeCopy]], at_least: int) -> None:
        """Name what the nodes hold that is of no use."""
        found = sorted(
            {
                (copy.step, copy.world_size)
                for copies in held.values()
                for copy in copies
                if copy.step >= at_least
            }
        )
        if found and self._members.rank == 0:
            logger.warning(
                "tier: the nodes have no whole state of %d ranks, so storage is read; they have "
                "copies of (step, ranks of the job) %s",
                self.plan.world_size,
                found,
            )

    def _remove_damaged(self, agreement: Agreement, held: Mapping[int, Sequence[NodeCopy]]) -> bool:
        """Compare all bytes of the copies here; return whether any node has removed one."""
        with agreement.phase("check") as phase:
            phase.payload = []
            for copy in held[self._members.node] if self._members.is_first else ():
                path = self._folder / copy.name
                problems = verify_checkpoint(path).problems
                if problems:
                    phase.payload.append(f"{path} is damaged: {problems[0]}")
                    remove_tree(path)
        damaged = [
            f"node {self.plan.names[node]!r}: {text}"
            for node, told in enumerate(self._members.by_node(phase.results))
            for text in told
        ]
        for text in damaged:
            warnings.warn(f"{text}; another copy is taken", DamagedCheckpointWarning, stacklevel=4)
        return bool(damaged)

    def _free(self) -> int:
        """Remove what is not of the last whole state; return the number of copies."""
        if not self._members.is_first:
            return 0
        return free_copies(self._folder, keep=() if self._state is None else (self._state[1],))

    def clear(self) -> None:
        """Remove all copies here, for a run that has ended well; not collective."""
        self._state = None
        self._free()

    def close(self) -> None:
        """Release the folder; not collective. The groups end with the default one."""
        if self._lock_fd >= 0:
            unlock_folder(self._lock_fd)
            self._lock_fd = -1

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(folder: Path) -> int:
    try:
        return lock_folder(folder, wait_s=_IN_USE_S)[0]
    except BlockingIOError as error:
        raise BlockingIOError(
            f"{folder} has been in use by another process for {_IN_USE_S:g} s; end that, and "
            "give each node and each run a folder of its own"
        ) from error
