"""What an output is made of, as data: tensors as byte ranges or computations, and its files.

A room of its own, since every job plans its output with it, whatever the tensors mean.

May import: operations, files, staging, pickles.
"""

from weight_convert.outputs.computed import Computations as Computations
from weight_convert.outputs.computed import Computed as Computed
from weight_convert.outputs.config import with_config as with_config
from weight_convert.outputs.files import FilePlan as FilePlan
from weight_convert.outputs.files import lay_out as lay_out
from weight_convert.outputs.kinds import Frame as Frame
from weight_convert.outputs.kinds import deal_to_kind as deal_to_kind
from weight_convert.outputs.target_file import TargetFile as TargetFile
from weight_convert.outputs.target_file import Unit as Unit
from weight_convert.outputs.tensors import PlannedTensor as PlannedTensor
from weight_convert.outputs.tensors import natural_key as natural_key
from weight_convert.outputs.weave import Weave as Weave
