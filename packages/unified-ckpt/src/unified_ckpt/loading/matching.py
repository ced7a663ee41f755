"""Which parameters of optimizers get a stored state, and which stored states nobody takes.

A name that does not match would else cost a run its moments without a word. Under several ranks a
state that this one does not take is another's, as long as all of its own parameters are found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from unified_ckpt.errors import LoadError
from unified_ckpt.loading.sources import Sources
from unified_ckpt.options import base_key
from unified_ckpt.saving.commit import Agreement
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


@dataclass(frozen=True, slots=True)
class PartUse:
    """Which stored tensors of a part a rank takes, or ignores.

    Attributes:
        keys: of all its tensors, in order.
        taken: for each key, whether this rank takes it.
        asked: whether the rank's state dict has this part; else it stands for another one.
    """

    keys: Sequence[str]
    taken: Sequence[bool]
    asked: bool


def parts_used(
    flat: FlatState, sources: Sources, is_ignored: Callable[[str], bool]
) -> dict[str, PartUse]:
    """Return what becomes of the stored tensors of each part that a state dict has or reads."""
    used = {}
    for part in {**flat.parts, **sources.taken}:
        if sources.has_part(part):
            taken, keys = sources.taken.get(part, set()), sorted(sources.index(part).tensor_keys())
            marks = [key in taken or is_ignored(key) for key in keys]
            used[part] = PartUse(keys, marks, part in flat.parts)
    return used


def unused_tensors(used: Mapping[str, PartUse], agreement: Agreement | None) -> tuple[str, ...]:
    """Return the stored keys of a state dict's parts that no rank takes.

    Collective with an agreement, over its ranks, which have read the same checkpoint. Without one
    only a process that is alone knows.
    """
    if agreement is None:
        if not _is_alone():
            return ()
        agreement = Agreement(None, timeout_s=0.0, subject="load")
    said = agreement.gather("parts", {part: len(use.keys) for part, use in used.items()})
    found: list[str] = []
    for part, num_keys in sorted({item for each in said for item in each.items()}):
        use = used.get(part, PartUse((), [False] * num_keys, asked=False))
        taken = agreement.any_at("unused", torch.tensor(use.taken, dtype=torch.bool)).tolist()
        if use.asked:
            found += [key for key, it_is in zip(use.keys, taken, strict=True) if not it_is]
    return tuple(found)


def _is_alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN])) or "none"
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
