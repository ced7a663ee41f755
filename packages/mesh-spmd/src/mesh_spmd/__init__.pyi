from mesh_spmd.axis_groups import axis_group as axis_group
from mesh_spmd.boxes import Box as Box
from mesh_spmd.boxes import all_boxes as all_boxes
from mesh_spmd.boxes import local_box as local_box
from mesh_spmd.choice import choose_placements as choose_placements
from mesh_spmd.errors import MeshSpmdError as MeshSpmdError
from mesh_spmd.errors import MeshStateError as MeshStateError
from mesh_spmd.errors import MeshTypeError as MeshTypeError
from mesh_spmd.errors import MeshValueError as MeshValueError
from mesh_spmd.mesh import ProcessMesh as ProcessMesh
from mesh_spmd.spec import Spec as Spec

__all__ = [
    "Box",
    "MeshSpmdError",
    "MeshStateError",
    "MeshTypeError",
    "MeshValueError",
    "ProcessMesh",
    "Spec",
    "all_boxes",
    "axis_group",
    "choose_placements",
    "local_box",
]
