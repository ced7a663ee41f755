"""Compare checkpoints, and write them again for another use.

May import: loading, saving, plans, files, geometry.
"""

from unified_ckpt.tools.diff import Difference as Difference
from unified_ckpt.tools.diff import diff_checkpoints as diff_checkpoints
from unified_ckpt.tools.rewrite import export_model as export_model
from unified_ckpt.tools.rewrite import reshard as reshard
