"""Tensors from one layout to another at the byte limit: plans as data, and their execution.

May import: layout and mesh.
"""

from mesh_spmd.reshard.execute import Exchange as Exchange
from mesh_spmd.reshard.execute import execute as execute
from mesh_spmd.reshard.gradients import join_tensors as join_tensors
from mesh_spmd.reshard.gradients import reshard_tensor as reshard_tensor
from mesh_spmd.reshard.gradients import split_tensor as split_tensor
from mesh_spmd.reshard.messages import Piece as Piece
from mesh_spmd.reshard.plan import Plan as Plan
from mesh_spmd.reshard.plan import plan_reshard as plan_reshard
from mesh_spmd.reshard.topology import Topology as Topology
