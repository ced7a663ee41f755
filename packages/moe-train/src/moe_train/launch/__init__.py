"""The room `launch`."""

from moe_train.launch.local import run_local as run_local
from moe_train.launch.rank_main import RankJobError as RankJobError
from moe_train.launch.rank_main import leave as leave
from moe_train.launch.rank_main import run_rank as run_rank
from moe_train.launch.signals import StopFlag as StopFlag
