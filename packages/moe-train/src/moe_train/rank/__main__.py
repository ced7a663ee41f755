"""The program of one rank: `python -m moe_train.rank RUN_DIR`."""

import sys
from pathlib import Path

from moe_train.rank.rank import leave
from moe_train.rank.rank_main import run_launched

leave(run_launched(Path(sys.argv[1])))
