"""Names of parameters that wrappers have changed: `module.w` and `_orig_mod.w` are the same as `w`.

DistributedDataParallel, torch.compile, FSDP and activation checkpointing each put a module into
another one, whose name then stands in every key. A module is stored without them; names of two
runs are the same if they are without them, and no two others are.

    Names(["module.w"]).find("_orig_mod.w")  # "module.w"
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MAYBE_WRAPPER = "module"  # a name that any module may have, too
_MARKS = tuple(f"{name}." for name in (*_WRAPPERS, _MAYBE_WRAPPER))
_HOLDERS = (nn.Module, Mapping, list, tuple)


class Names:
    """Finds a name of one run among those of another."""

    def __init__(self, names: Iterable[str]) -> None:
        self.all = set(names)
        self._by_plain: dict[str, str | None] | None = None

    def find(self, name: str) -> str | None:
        """Return the equal name, or the only one that is equal without wrappers; None if none."""
        if name in self.all:
            return name
        if self._by_plain is None:
            self._by_plain = {}
            for each in self.all:
                plain = plain_name(each)
                self._by_plain[plain] = None if plain in self._by_plain else each
        return self._by_plain.get(plain_name(name))


def plain_name(name: str) -> str:
    """Return a key without the names of wrappers; what follows a slash stays as it is."""
    parameter, slash, state = name.partition("/")
    kept = [step for step in parameter.split(".") if step not in (*_WRAPPERS, _MAYBE_WRAPPER)]
    return f"{'.'.join(kept)}{slash}{state}" if kept else name


def plain_key(module: nn.Module, key: str) -> str:
    """Return a key of a module's state dict without the names of the wrappers that it goes through.

    `module` is left out where a DistributedDataParallel or DataParallel holds it, not elsewhere.
    """
    for mark in _MARKS:
        if mark in key:
            break
    else:
        return key
    kept: list[str] = []
    owner: object = module
    for step in key.split("."):
        parallel = isinstance(owner, nn.parallel.DistributedDataParallel | nn.DataParallel)
        if step not in _WRAPPERS and not (parallel and step == _MAYBE_WRAPPER):
            kept.append(step)
        owner = getattr(owner, step, None)
    return ".".join(kept)


class ModuleNames:
    """Stored names of the parameters of all modules in a state dict; found when first asked for."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._state_dict = state_dict
        self._by_identity: dict[int, str] | None = None

    def of(self, parameter: object) -> str | None:
        """Return the name of a parameter, None if no module of the state dict has it."""
        if self._by_identity is None:
            self._by_identity = {}
            todo: deque[tuple[str, Any]] = deque(
                [("", value) for value in self._state_dict.values()]
            )
            while todo:
                prefix, value = todo.popleft()
                if isinstance(value, nn.Module):
                    for key, held in value.named_parameters():
                        name = f"{prefix}{plain_key(value, key)}"
                        self._by_identity.setdefault(id(held), name)
                elif isinstance(value, Mapping | list | tuple):
                    items = value.items() if isinstance(value, Mapping) else enumerate(value)
                    todo += [(f"{prefix}{n}.", v) for n, v in items if isinstance(v, _HOLDERS)]
        return self._by_identity.get(id(parameter))

    def in_order(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the only module of a state dict in their order; else nothing."""
        modules = [value for value in self._state_dict.values() if isinstance(value, nn.Module)]
        if len(modules) != 1:
            return []
        return [(plain_key(modules[0], key), held) for key, held in modules[0].named_parameters()]
