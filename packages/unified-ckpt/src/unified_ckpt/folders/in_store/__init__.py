"""What a folder of checkpoints needs where it lies in a store: its note, and removals.

May import: saving, plans, files.
"""

from unified_ckpt.folders.in_store.note import Holder as Holder
from unified_ckpt.folders.in_store.note import RunNote as RunNote
from unified_ckpt.folders.in_store.note import note_place as note_place
from unified_ckpt.folders.in_store.note import read_note as read_note
from unified_ckpt.folders.in_store.removal import clean_stored as clean_stored
from unified_ckpt.folders.in_store.removal import remove_stored as remove_stored
