"""The folder of a run: the newest valid checkpoint, rotation.

May import: saving, plans, files.
"""

from unified_ckpt.folders.folder import Depth as Depth
from unified_ckpt.folders.folder import check_depth as check_depth
from unified_ckpt.folders.folder import check_no_link as check_no_link
from unified_ckpt.folders.folder import check_steps_free as check_steps_free
from unified_ckpt.folders.folder import checked_checkpoints as checked_checkpoints
from unified_ckpt.folders.folder import find_fault as find_fault
from unified_ckpt.folders.folder import get_last_checkpoint as get_last_checkpoint
from unified_ckpt.folders.folder import is_complete as is_complete
from unified_ckpt.folders.folder import numbered_checkpoints as numbered_checkpoints
from unified_ckpt.folders.folder import rotate as rotate
from unified_ckpt.folders.folder import step_of as step_of
from unified_ckpt.folders.folder import valid_checkpoints as valid_checkpoints
