"""The only code that changes the file system, so that a crash can be reasoned about.

Catalogue: the calls on files and folders.

May import: no room.
"""

from unified_ckpt.files.opened import OpenFolder as OpenFolder
from unified_ckpt.files.opened import ReadFolder as ReadFolder
from unified_ckpt.files.opened import is_damage as is_damage
from unified_ckpt.files.system import BATCH_BYTES as BATCH_BYTES
from unified_ckpt.files.system import Buffer as Buffer
from unified_ckpt.files.system import PositionedFile as PositionedFile
from unified_ckpt.files.system import begin_writeback as begin_writeback
from unified_ckpt.files.system import exchange as exchange
from unified_ckpt.files.system import free_bytes as free_bytes
from unified_ckpt.files.system import link_file as link_file
from unified_ckpt.files.system import lock_folder as lock_folder
from unified_ckpt.files.system import make_folder as make_folder
from unified_ckpt.files.system import make_folders as make_folders
from unified_ckpt.files.system import open_for_write as open_for_write
from unified_ckpt.files.system import read_at as read_at
from unified_ckpt.files.system import read_runs as read_runs
from unified_ckpt.files.system import remove_tree as remove_tree
from unified_ckpt.files.system import rename as rename
from unified_ckpt.files.system import size_of as size_of
from unified_ckpt.files.system import sync_file as sync_file
from unified_ckpt.files.system import sync_folder as sync_folder
from unified_ckpt.files.system import sync_tree as sync_tree
from unified_ckpt.files.system import unlock_folder as unlock_folder
from unified_ckpt.files.system import write_at as write_at
