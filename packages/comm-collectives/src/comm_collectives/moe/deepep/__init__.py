"""Dispatch and combine over DeepEP's GPU kernels.

May import: rows, routes.
"""

from comm_collectives.moe.deepep.backend import DeepEpBackend as DeepEpBackend
