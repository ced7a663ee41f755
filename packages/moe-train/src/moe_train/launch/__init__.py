"""Processes of a job: started on this machine, watched over, stopped and ended together.

It knows nothing of training: a rank runs a module that is given by its name.
May import: rank, cache, errors.
"""

from moe_train.launch.local import run_local as run_local
