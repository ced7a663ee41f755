"""Which rank stands where, as plain data, and the process groups along its axes.

May import: no room.
"""

from mesh_spmd.mesh.axis_groups import axis_group as axis_group
from mesh_spmd.mesh.process_mesh import ProcessMesh as ProcessMesh
