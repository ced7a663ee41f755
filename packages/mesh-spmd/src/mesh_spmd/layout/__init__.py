"""How a tensor lies on a mesh, and which box of it each rank holds.

May import: mesh.
"""

from mesh_spmd.layout.boxes import Box as Box
from mesh_spmd.layout.boxes import all_boxes as all_boxes
from mesh_spmd.layout.boxes import dim_bounds as dim_bounds
from mesh_spmd.layout.boxes import local_box as local_box
from mesh_spmd.layout.choice import choose_placements as choose_placements
from mesh_spmd.layout.flat import FlatSpec as FlatSpec
from mesh_spmd.layout.spec import PARTIAL_KINDS as PARTIAL_KINDS
from mesh_spmd.layout.spec import Spec as Spec
from mesh_spmd.layout.state import TensorLayout as TensorLayout
from mesh_spmd.layout.state import choose_layouts as choose_layouts
from mesh_spmd.layout.tensor_spec import TensorSpec as TensorSpec
