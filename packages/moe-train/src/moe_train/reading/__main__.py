"""The program of a process that makes pieces: `python -m moe_train.reading SOCKET`."""

import sys
from multiprocessing.connection import Connection

from moe_train.reading.worker import serve

serve(Connection(int(sys.argv[1])))
