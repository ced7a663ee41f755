"""A moving average of the weights, kept by the saver processes on the snapshots that they get.

It is fp32, element by element, so that no layout changes a bit of it, and lies in shared memory
that outlives a saver process. A snapshot is taken in on all ranks or on none: the savers decide
when they meet for it. One that is killed afterwards would leave its rank behind; so its trainer
keeps the snapshot, and the next saver takes it in before anything else. The memory says how far:
the last snapshot taken in, the units of it that are done, and an undo copy of the unit that was
being changed. Nothing else is written down.

May import: snapshots, geometry.
"""

from unified_ckpt.snapshots.average.ema import EMA_FILE as EMA_FILE
from unified_ckpt.snapshots.average.ema import EMA_PART as EMA_PART
from unified_ckpt.snapshots.average.ema import EmaConfig as EmaConfig
from unified_ckpt.snapshots.average.ema import EmaMemory as EmaMemory
from unified_ckpt.snapshots.average.ema import average_for as average_for
