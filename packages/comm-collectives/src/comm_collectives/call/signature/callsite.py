"""Where in the user's program a collective was called: the innermost line outside this and torch.

Two ranks whose lines differ make different calls, even if shapes and dtypes fit. Programs that call
from two places and mean one call say so:

    with call_site("total loss"):
        total = all_reduce(loss if is_last else zero)
"""

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

import comm_collectives
from comm_collectives.errors import CommTypeError, CommValueError

_PACKAGE = os.path.dirname(os.path.abspath(str(comm_collectives.__file__)))
_INSIDE = (_PACKAGE, os.path.dirname(os.path.abspath(str(torch.__file__))))
# Files of this package whose calls stand for a user's.
_LIKE_A_PROGRAM = os.path.join(_PACKAGE, "checking", "misuse")


@dataclass(frozen=True, slots=True)
class CallSite:
    """A place in the user's program as text, and as the number that travels.

    One that the user has named is compared for every call, also for those that rightly stand in
    two lines, such as a broadcast; one from which torch's own programs call is never.
    """

    text: str
    word: int
    is_named: bool = False
    is_compared: bool = True


_NAMED: ContextVar[CallSite | None] = ContextVar("comm_collectives_call_site", default=None)
# Where torch's collectives of objects are made of others, for the program that calls them.
_API = {
    os.path.join(_INSIDE[1], "distributed", f"{n}.py") for n in ("distributed_c10d", "c10d_logger")
}
# Walking the stack is cheap only if each file and each line is looked at once. Code objects would
# not do as keys: they are equal if all but the name of their file is.
_IS_INSIDE: dict[str, bool] = {}
_SITES: dict[tuple[str, int], CallSite] = {}


def call_site(name: str) -> AbstractContextManager[None]:
    """Name the collectives called inside, instead of naming them by file and line.

    For calls that stand in several places of a program and still are one call of the group. Not
    collective itself, but every rank has to use the same name.

    Raises:
        TypeError: the name is not a str.
        ValueError: it is empty.
    """
    if not isinstance(name, str):
        raise CommTypeError(f"name={name!r} is a {type(name).__name__}; give a str, as a title")
    if not name:
        raise CommValueError("name is empty; give the calls inside a name, the same on every rank")
    return use_site(_site(name, is_named=True))


@contextmanager
def use_site(site: CallSite) -> Iterator[None]:
    """Let the calls inside count as made at `site`."""
    token = _NAMED.set(site)
    try:
        yield
    finally:
        _NAMED.reset(token)


def current_site() -> CallSite:
    """Return the name given by `call_site`, or else the innermost line of the user's program."""
    named = _NAMED.get()
    if named is not None:
        return named
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    key = (frame.f_code.co_filename, frame.f_lineno)
    site = _SITES.get(key)
    if site is None:
        # Folders above differ between hosts; the file and its package do not.
        path = "/".join(key[0].replace(os.sep, "/").split("/")[-2:])
        site = _SITES[key] = _site(f"{path}:{frame.f_lineno}")
    return site


def site_in_torch() -> CallSite | None:
    """Return where the user is, if it is torch's own program that calls the function that asks.

    Pipelines and joins of torch call from several lines, on behalf of several lines of the user.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in _API:
        frame = frame.f_back
    site = current_site() if _is_inside(frame.f_code.co_filename) else None
    return None if site is None or site.is_named else replace(site, is_compared=False)


def _site(text: str, *, is_named: bool = False) -> CallSite:
    return CallSite(text, zlib.crc32(text.encode()), is_named)


def _is_inside(path: str) -> bool:
    inside = _IS_INSIDE.get(path)
    if inside is None:
        folder = os.path.dirname(os.path.abspath(path))
        inside = folder != _LIKE_A_PROGRAM and any(
            folder == top or folder.startswith(top + os.sep) for top in _INSIDE
        )
        _IS_INSIDE[path] = inside
    return inside
