"""Keep an exception instead of raising it, where it belongs to somebody else.

A thread that works for another one must hand on whatever goes wrong, of any kind.

    with Caught() as caught:
        result = run()
    if caught.error is not None:
        future.set_exception(caught.error)
"""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import final


@final
class Caught(AbstractContextManager["Caught"]):
    """A block whose exceptions, of `kinds` but for those `passing`, are kept in `error`."""

    def __init__(
        self,
        kinds: type[BaseException] = BaseException,
        *,
        passing: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._kinds = kinds
        self._passing = passing
        self.error: BaseException | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, self._kinds) and not isinstance(error, self._passing):
            self.error = error
            return True
        return False
