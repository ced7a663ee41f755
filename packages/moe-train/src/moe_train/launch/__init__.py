"""Processes of a job: started on this machine, watched over, stopped and ended together.

May import: data, errors. It knows nothing of training: a rank runs a module given by its name.
"""

from moe_train.launch.local import run_local as run_local
from moe_train.launch.rank import RankContext as RankContext
from moe_train.launch.rank import RankJobError as RankJobError
from moe_train.launch.rank import leave as leave
from moe_train.launch.rank import run_rank as run_rank
from moe_train.launch.rank import watch_stop_signals as watch_stop_signals
