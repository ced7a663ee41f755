"""The base of what may be computed.

class Cast(Operation): ...
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How one tensor is computed from others; each subclass says which inputs it takes.

    `CHUNK_ELEMENTS` are computed at once, unless memory is limited to less.
    """

    CHUNK_ELEMENTS: ClassVar[int] = 1 << 20
