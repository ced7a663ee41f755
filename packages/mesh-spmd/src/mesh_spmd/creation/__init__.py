"""A rank's part of a new tensor, without the whole: the same values in every layout.

May import: layout and mesh.
"""

from mesh_spmd.creation.inference import infer_tensor_spec as infer_tensor_spec
from mesh_spmd.creation.values import arange as arange
from mesh_spmd.creation.values import empty as empty
from mesh_spmd.creation.values import full as full
from mesh_spmd.creation.values import randn as randn
from mesh_spmd.creation.values import shard_tensor as shard_tensor
