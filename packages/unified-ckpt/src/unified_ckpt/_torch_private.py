"""The private torch names that this package needs, in one place that an upgrade has to check.

`torch.distributed` keeps the store of the default group to itself; it tells who did not arrive.
"""

from torch._C._distributed_c10d import Store as Store
from torch.distributed.distributed_c10d import _get_default_store


def default_store() -> Store:
    """Return the store that `init_process_group` made.

    Raises:
        ValueError: no process group has been initialised.
    """
    return _get_default_store()
