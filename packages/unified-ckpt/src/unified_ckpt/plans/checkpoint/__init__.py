"""A checkpoint directory opened for reading, and the check of all its bytes.

May import: plans, files, geometry.
"""

from unified_ckpt.plans.checkpoint.directory import MOST_ATTEMPTS as MOST_ATTEMPTS
from unified_ckpt.plans.checkpoint.directory import Checkpoint as Checkpoint
from unified_ckpt.plans.checkpoint.directory import check_bytes as check_bytes
from unified_ckpt.plans.checkpoint.directory import load_files as load_files
from unified_ckpt.plans.checkpoint.directory import read_checkpoint as read_checkpoint
from unified_ckpt.plans.checkpoint.directory import read_index as read_index
from unified_ckpt.plans.checkpoint.stored_folder import StoredFolder as StoredFolder
from unified_ckpt.plans.checkpoint.stored_folder import as_load_errors as as_load_errors
from unified_ckpt.plans.checkpoint.stored_folder import is_stored as is_stored
from unified_ckpt.plans.checkpoint.verify import VerifyReport as VerifyReport
from unified_ckpt.plans.checkpoint.verify import verify_checkpoint as verify_checkpoint
from unified_ckpt.plans.checkpoint.verify import verify_opened as verify_opened
