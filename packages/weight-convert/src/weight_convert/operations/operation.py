"""The base of what may be computed.

class Cast(Operation): ...
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How one tensor is computed from others; each subclass says which inputs it takes."""
