"""What torch allocates, as traces. Importing this room imports torch.

May import: core, sources, trace.
"""

from gpu_alloc.torch.recorder import TraceRecorder as TraceRecorder
