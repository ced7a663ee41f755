"""The command `gpu-alloc`, one file a command.

May import: any room.
"""

from gpu_alloc.cli.main import main as main
from gpu_alloc.cli.options import parse_size as parse_size
