"""Deliberate mistakes. A file here counts as a user's program (see `call/signature`).

May import: call, collectives, moe, nested, p2p, cells, results.
"""

from comm_collectives.checking.misuse.outcome import At as At
from comm_collectives.checking.misuse.outcome import Misuse as Misuse
from comm_collectives.checking.misuse.outcome import judge_misuse as judge_misuse
from comm_collectives.checking.misuse.outcome import judge_raw_misuse as judge_raw_misuse
from comm_collectives.checking.misuse.outcome import run_misuse as run_misuse
from comm_collectives.checking.misuse.outcome import run_raw_misuse as run_raw_misuse
from comm_collectives.checking.misuse.table import MISUSE_OF as MISUSE_OF
from comm_collectives.checking.misuse.table import MISUSES as MISUSES
from comm_collectives.checking.misuse.table import RAW as RAW
