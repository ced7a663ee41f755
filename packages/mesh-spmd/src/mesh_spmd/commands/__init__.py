"""The sub-commands: each a file with its options and what it prints.

May import: trials, reshard, layout and mesh, late, so that `--help` answers without
importing torch.
"""

from mesh_spmd.commands.boxes import BOXES as BOXES
from mesh_spmd.commands.check import CHECK as CHECK
from mesh_spmd.commands.groups import GROUPS as GROUPS
from mesh_spmd.commands.layout import LAYOUT as LAYOUT
from mesh_spmd.commands.options import Answer as Answer
from mesh_spmd.commands.options import Command as Command
from mesh_spmd.commands.place import PLACE as PLACE
from mesh_spmd.commands.plan import PLAN as PLAN
