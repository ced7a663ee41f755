"""The room `deepep`."""

from comm_collectives.moe.deepep.backend import DeepEpBackend as DeepEpBackend
