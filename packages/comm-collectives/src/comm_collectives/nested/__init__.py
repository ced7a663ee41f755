"""The room `nested`."""

from comm_collectives.nested.broadcast import broadcast_nested as broadcast_nested
