"""The boxes of all ranks as columns of numbers: who holds what, and who writes it.

Plans of thousands of ranks are made of these; no object stands for a box of another rank.

May import: geometry.
"""

from unified_ckpt.plans.columns.box_table import BoxTable as BoxTable
from unified_ckpt.plans.columns.box_table import encode_boxes as encode_boxes
from unified_ckpt.plans.columns.held_boxes import HeldBoxes as HeldBoxes
from unified_ckpt.plans.columns.writers import Writers as Writers
from unified_ckpt.plans.columns.writers import choose_writers as choose_writers
