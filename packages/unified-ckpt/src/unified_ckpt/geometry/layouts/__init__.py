"""Boxes of every parallel layout: DTensors, and rules for plain tensors.

May import: geometry, tensors.
"""

from unified_ckpt.geometry.layouts.dtensor import dtensor_shards as dtensor_shards
from unified_ckpt.geometry.layouts.dtensor import is_dtensor as is_dtensor
from unified_ckpt.geometry.layouts.layouts import Layout as Layout
from unified_ckpt.geometry.layouts.layouts import ParallelDegrees as ParallelDegrees
from unified_ckpt.geometry.layouts.layouts import ParameterRule as ParameterRule
from unified_ckpt.geometry.layouts.layouts import expert_shards as expert_shards
from unified_ckpt.geometry.layouts.layouts import global_expert_keys as global_expert_keys
from unified_ckpt.geometry.layouts.layouts import rank_box as rank_box
