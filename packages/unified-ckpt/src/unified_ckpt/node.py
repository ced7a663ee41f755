"""The name of the machine that this process runs on, the same for all of its ranks.

Files are grouped by it, and copies go to others: UNIFIED_CKPT_NODE, or the host's name.

    node_name() == node_name()  # on every process of a machine
"""

import os
import socket

NODE_VARIABLE = "UNIFIED_CKPT_NODE"


def node_name() -> str:
    """Return the name."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()
