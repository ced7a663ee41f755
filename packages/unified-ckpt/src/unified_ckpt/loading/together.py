"""Ranks that load together read the same checkpoint, and what one of them raises, all raise.

Each rank opens the directory and holds it; before anything is read, all have the same manifest. If
one of them finds its directory replaced, all begin again with the checkpoint that is there by then.

    read_together(agreement, "run/checkpoint-10", lambda checkpoint: checkpoint.read_file("a.json"))
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    LoadError,
    ReplacedCheckpointError,
    SaveArgumentError,
    SaveError,
    SavePeerError,
)
from unified_ckpt.files import is_damage
from unified_ckpt.files.storage import Location
from unified_ckpt.plans.checkpoint import MOST_ATTEMPTS, Checkpoint
from unified_ckpt.saving.commit import Agreement

_T = TypeVar("_T")


def read_together(
    agreement: Agreement,
    checkpoint_id: Path | str | Location,
    read: Callable[[Checkpoint], _T],
    *,
    identity: str | None = None,
    attempts: int = MOST_ATTEMPTS,
) -> _T:
    """Call `read` on every rank with the same checkpoint; collective over the agreement's group.

    Args:
        agreement: the ranks.
        checkpoint_id: the directory, the same on every rank.
        read: reads from what it is given, or by name; the name leads to it all the while.
        identity: of the only checkpoint that may be read (`Checkpoint.identity`); None for any.
        attempts: how often a checkpoint that was replaced meanwhile is taken as it is by then.

    Raises:
        CorruptCheckpointError: some rank found damage, or could not read. On every rank.
        ReplacedCheckpointError: the checkpoint was replaced in each attempt. On every rank.
        LoadError: `read` failed on some rank for another reason. On every rank.
        CheckpointValueError: it failed on arguments. On every rank.
        SavePeerError: a rank did not arrive in time.
    """
    for _ in range(attempts - 1):
        try:
            return _read_once(agreement, checkpoint_id, read, identity)
        except ReplacedCheckpointError:
            continue
    return _read_once(agreement, checkpoint_id, read, identity)


def _read_once(
    agreement: Agreement,
    checkpoint_id: Path | str | Location,
    read: Callable[[Checkpoint], _T],
    wanted: str | None,
) -> _T:
    def open_here() -> tuple[Checkpoint, str]:
        with ExitStack() as stack:  # an error closes it, or says that it was replaced meanwhile
            opened = stack.enter_context(Checkpoint(checkpoint_id))
            identity = opened.identity
            stack.pop_all()
        return opened, identity

    checkpoint, identity = _on_all(agreement, "open", open_here)

    def finish() -> _T:
        with checkpoint:
            value = read(checkpoint)
            if not checkpoint.opened.leads_here():
                raise checkpoint.replaced()
            return value

    opened = set(agreement.gather("identity", identity))
    if len(opened) > 1 or wanted not in (None, *opened):
        checkpoint.opened.close()
        raise checkpoint.replaced()  # on every rank
    return _on_all(agreement, "load", finish)


def _on_all(agreement: Agreement, name: str, work: Callable[[], _T]) -> _T:
    """Call `work` on every rank, and raise on all what any of them raises."""
    value: Any = None
    try:
        with agreement.phase(name, checks_arguments=True) as phase:
            try:
                value = work()
            except (ReplacedCheckpointError, CorruptCheckpointError, OSError) as error:
                if isinstance(error, OSError) and not is_damage(error):
                    raise
                replaced = isinstance(error, ReplacedCheckpointError)
                phase.payload = ["replaced" if replaced else "damaged", str(error)]
    except SavePeerError:
        raise
    except SaveArgumentError as error:
        raise CheckpointValueError(str(error)) from error
    except SaveError as error:
        raise LoadError(str(error)) from error
    said = {
        kind: [
            f"rank {agreement.global_rank(rank)}: {result[1]}"
            for rank, result in enumerate(phase.results)
            if result is not None and result[0] == kind
        ]
        for kind in ("replaced", "damaged")
    }
    if said["replaced"]:  # whoever found damage may have read the other one
        raise ReplacedCheckpointError("; ".join(said["replaced"]))
    if said["damaged"]:
        raise CorruptCheckpointError("; ".join(said["damaged"]))
    return cast(_T, value)
