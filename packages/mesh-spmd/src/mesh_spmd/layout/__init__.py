"""How a tensor lies on a mesh, and which box of it each rank holds.

May import: mesh.
"""

from mesh_spmd.layout.boxes import Box as Box
from mesh_spmd.layout.boxes import all_boxes as all_boxes
from mesh_spmd.layout.boxes import local_box as local_box
from mesh_spmd.layout.choice import choose_placements as choose_placements
from mesh_spmd.layout.spec import Spec as Spec
