"""Which parameters of optimizers get a stored state, and which stored states nobody takes.

A name that does not match would else cost a run its moments without a word. Under several ranks a
state that this one does not take is another's, as long as all of its own parameters are found.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from unified_ckpt.errors import LoadError
from unified_ckpt.loading.sources import Sources
from unified_ckpt.options import base_key
from unified_ckpt.state import FlatState
from unified_ckpt.state.naming import Names

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """Optimizers of one part, and its stored states.

    Attributes:
        part: where both are.
        without: parameters of which no state is stored, though they may have had one.
        dropped: parameters of which states are stored, but that have no place for them.
        untaken: stored names that no parameter has.
    """

    part: str
    without: Sequence[str]
    dropped: Sequence[str]
    untaken: Sequence[str]


def find_unmatched(
    flat: FlatState, sources: Sources, is_ignored: Callable[[str], bool]
) -> list[Unmatched]:
    """Compare the optimizers of a state dict with the stored states; one item for each part."""
    return [_of_part(part, flat, sources, is_ignored) for part in flat.optimized]


def _of_part(
    part: str, flat: FlatState, sources: Sources, is_ignored: Callable[[str], bool]
) -> Unmatched:
    parameters = flat.optimized[part]
    keys = [key for key in sources.state_keys(part) if not is_ignored(key)]
    stored = Names(base_key(key) for key in keys)
    taken = {base_key(shard.key) for shard in flat.parts.get(part, ())}
    without, dropped = [], []
    for key, has_state in parameters.items():
        name = sources.state_name(stored, key)
        if name is not None:
            taken.add(name)
            if not has_state:
                dropped.append(key)
        elif not has_state and not (
            is_ignored(key) or is_ignored(f"{key}/") or sources.is_stateless(part, key)
        ):
            without.append(key)
    untaken = sorted(stored.all - taken)
    if sources.stateless is None and not untaken:  # it does not say which had no state
        without = []
    return Unmatched(
        part=part,
        without=without if stored.all else [],
        dropped=dropped,
        untaken=untaken if without or _is_alone() else [],
    )


def check_all_matched(found: Sequence[Unmatched], folder: object) -> None:
    """Raise for states that would be lost.

    Raises:
        LoadError: there are some; the message has both lists of names.
    """
    for each in found:
        if each.dropped:
            raise LoadError(
                f"{folder}: part {each.part!r} holds states of {_shown(each.dropped)}, but the "
                "optimizer's state dict has none to fill; pass the optimizer itself, or "
                "get_optimizer_state_dict(...)"
            )
        if each.without or each.untaken:
            raise LoadError(
                f"{folder}: the names of part {each.part!r} do not match: no state is stored of "
                f"{_shown(each.without)}; nothing takes the stored ones of {_shown(each.untaken)}. "
                "Name the parameters as they were saved, or leave those alone with strict=False "
                "or ignored_keys"
            )


def lost(found: Sequence[Unmatched]) -> list[str]:
    """Return the parameters that a load leaves without the states that others get."""
    return [key for each in found for key in (*each.dropped, *each.without)]


def _is_alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN])) or "none"
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
