"""A moving average of the weights, taken from snapshots.

May import: snapshots, geometry.
"""

from unified_ckpt.snapshots.average.ema import EMA_FILE as EMA_FILE
from unified_ckpt.snapshots.average.ema import EMA_PART as EMA_PART
from unified_ckpt.snapshots.average.ema import EmaConfig as EmaConfig
from unified_ckpt.snapshots.average.ema import EmaMemory as EmaMemory
from unified_ckpt.snapshots.average.ema import average_for as average_for
