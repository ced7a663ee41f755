"""Processes of a job: started on this machine, watched over, stopped and ended together.

May import: rank. It knows nothing of training: a rank runs a module given by its name.
"""

from moe_train.launch.local import run_local as run_local
