"""Nested Python values with tensors in them, without pickle and without guessing sizes.

May import: base, call, collectives.
"""

from comm_collectives.nested.broadcast import broadcast_nested as broadcast_nested
