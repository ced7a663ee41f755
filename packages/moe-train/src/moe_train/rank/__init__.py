"""One rank of a job: its program, what it is given, and what it leaves for the launcher.

It imports no torch, so that a rank notices signals soon after its start.
May import: unified-ckpt (signals).
"""

from moe_train.rank.environment import RankPlace as RankPlace
from moe_train.rank.environment import find_place as find_place
from moe_train.rank.fork_server import ForkServer as ForkServer
from moe_train.rank.rank import RankContext as RankContext
from moe_train.rank.rank import RankError as RankError
from moe_train.rank.rank import RankJob as RankJob
from moe_train.rank.rank import RankJobError as RankJobError
from moe_train.rank.rank import leave as leave
from moe_train.rank.rank import rank_file as rank_file
from moe_train.rank.rank import rank_number as rank_number
from moe_train.rank.rank import run_rank as run_rank
from moe_train.rank.rank import watch_stop_signals as watch_stop_signals
