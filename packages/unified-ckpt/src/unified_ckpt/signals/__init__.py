"""Notice signals and act on them later: a save must not begin in the middle of a step.

It needs no torch, so that a process that only waits for signals starts at once.
May import: no room.
"""

from unified_ckpt.signals.watch import DEFAULT_SIGNALS as DEFAULT_SIGNALS
from unified_ckpt.signals.watch import Signals as Signals
from unified_ckpt.signals.watch import SignalWatch as SignalWatch
from unified_ckpt.signals.watch import stops_training as stops_training
