"""Several models of one shape made one: `merge`, and how it is described.

A room of its own, since only here an output is made of more than one directory.

May import: run, plan, outputs, operations, specs, files.
"""

from weight_convert.merging.config import MergeConfig as MergeConfig
from weight_convert.merging.config import MergeModel as MergeModel
from weight_convert.merging.config import Slice as Slice
from weight_convert.merging.config import read_config as read_config
from weight_convert.merging.merging import merge as merge
