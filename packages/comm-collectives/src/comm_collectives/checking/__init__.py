"""The commands `check`, `bench` and `run`: is it right here, how fast, and is a program right?

May import: base, call, collectives, shm.
"""

from comm_collectives.checking.bench import BenchResult as BenchResult
from comm_collectives.checking.bench import bench_machine as bench_machine
from comm_collectives.checking.bench import format_bench as format_bench
from comm_collectives.checking.bench import quartiles as quartiles
from comm_collectives.checking.bench import run_bench as run_bench
from comm_collectives.checking.matrix import FEW_DTYPES as FEW_DTYPES
from comm_collectives.checking.matrix import check_machine as check_machine
from comm_collectives.checking.program import run_program as run_program
from comm_collectives.checking.rank_side import HERE as HERE
from comm_collectives.checking.rank_side import WIRE as WIRE
from comm_collectives.checking.table import format_table as format_table
from comm_collectives.checking.table import to_json as to_json
