"""How torch comes to know the backend, and what it gets for a group.

register_backends()
dist.init_process_group("comm_shm")                  # or "cpu:comm_shm,cuda:nccl"
"""

from typing import Any

import torch
import torch.distributed as dist

from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.shm.backend import BACKEND_NAME, ShmBackend
from comm_collectives.shm.group import ShmGroup

# Accelerators whose backends torch tells from those of others.
_KNOWN = ("cuda", "xpu", "mps")


def register_backends() -> None:
    """Make the backend "comm_shm" known to `torch.distributed`. Harmless if called again.

    Before torch let backends be written in Python (2.11), groups of this name are plain gloo.
    """
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> Any:
    """Make what torch asks for: a group where this backend is alone in it. Collective."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if not backends_may_be_python():
        return dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
    backend = ShmBackend(options.store, options.group_rank, ranks, options.timeout)
    return ShmGroup(options.store, backend) if _is_alone(options.process_group) else backend


def _is_alone(group: dist.ProcessGroup) -> bool:
    """Whether a group in the making has no backend but this one."""
    # A group of several names the one of its accelerator as its default.
    accelerator = torch.accelerator.current_accelerator()
    is_own = group._get_backend_name() == "custom"
    return is_own and (accelerator is None or accelerator.type in _KNOWN)
