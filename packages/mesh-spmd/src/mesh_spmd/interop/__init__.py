"""torch's DTensors as the specs of this package, and back.

May import: reshard, layout, mesh.
"""

from mesh_spmd.interop.dtensor import from_dtensor as from_dtensor
from mesh_spmd.interop.dtensor import redistribute as redistribute
from mesh_spmd.interop.dtensor import to_dtensor as to_dtensor
