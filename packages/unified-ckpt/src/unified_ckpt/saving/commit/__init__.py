"""Written bytes become a checkpoint: agreement of ranks, checksums, one rename.

May import: plans, files, devices, geometry.
"""

from unified_ckpt.saving.commit.agreement import Agreement as Agreement
from unified_ckpt.saving.commit.commit import Staging as Staging
from unified_ckpt.saving.commit.commit import check_replaceable as check_replaceable
from unified_ckpt.saving.commit.commit import clean_leftovers as clean_leftovers
from unified_ckpt.saving.commit.commit import hidden_name as hidden_name
from unified_ckpt.saving.commit.draft import Draft as Draft
from unified_ckpt.saving.commit.writer import write_blobs as write_blobs
from unified_ckpt.saving.commit.writer import write_pieces as write_pieces
from unified_ckpt.saving.commit.writer import write_share as write_share
