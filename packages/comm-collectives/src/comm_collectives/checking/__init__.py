"""The commands `check` and `run`: is it right here, and is a program right?

May import: base, call, collectives, shm.
"""

from comm_collectives.checking.local_ranks import START_S as START_S
from comm_collectives.checking.local_ranks import LocalRanks as LocalRanks
from comm_collectives.checking.matrix import FEW_DTYPES as FEW_DTYPES
from comm_collectives.checking.matrix import check_machine as check_machine
from comm_collectives.checking.matrix import on_devices as on_devices
from comm_collectives.checking.program import is_there as is_there
from comm_collectives.checking.program import run_program as run_program
from comm_collectives.checking.rank_side import HERE as HERE
from comm_collectives.checking.rank_side import WIRE as WIRE
from comm_collectives.checking.table import format_table as format_table
from comm_collectives.checking.table import to_json as to_json
