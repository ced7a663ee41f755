"""Which part of a tensor a rank holds, and where its bytes lie in a file.

May import: geometry/tensors.
"""

from unified_ckpt.geometry.box import Box as Box
from unified_ckpt.geometry.box import chunk_range as chunk_range
from unified_ckpt.geometry.flat import round_up as round_up
from unified_ckpt.geometry.regions import Region as Region
from unified_ckpt.geometry.regions import Shape as Shape
from unified_ckpt.geometry.regions import box_region as box_region
from unified_ckpt.geometry.regions import check_tiling as check_tiling
from unified_ckpt.geometry.regions import overlap as overlap
from unified_ckpt.geometry.regions import split_box as split_box
from unified_ckpt.geometry.shard import BoxMeta as BoxMeta
from unified_ckpt.geometry.shard import Shard as Shard
from unified_ckpt.geometry.shard import check_plain as check_plain
