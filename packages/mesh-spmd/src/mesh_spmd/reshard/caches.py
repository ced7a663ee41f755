"""What planning keeps for the next plan, and how it is forgotten.

forget_plans()    # the next plan is made as in a new process
"""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_FORGET: list[Callable[[], None]] = []


def remembered(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As functools.lru_cache, and emptied by `forget_plans`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept = lru_cache(maxsize=maxsize)(function)
        _FORGET.append(kept.cache_clear)
        return cast("Callable[P, T]", kept)

    return decorate


def forget_plans() -> None:
    """Empty the caches of planning: to measure it, or to give their memory back."""
    for forget in _FORGET:
        forget()
