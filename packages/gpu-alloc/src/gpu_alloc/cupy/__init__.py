"""CuPy's arrays in our pool, and a recorder of CuPy's own. Imports cupy on first use.

May import: core, native, plan, sources, trace; gpu_alloc.torch when asked to share with it.
"""

from gpu_alloc.cupy.backend import CudaBackend as CudaBackend
from gpu_alloc.cupy.backend import CupyBackend as CupyBackend
from gpu_alloc.cupy.backend import HostBackend as HostBackend
from gpu_alloc.cupy.hooks import TraceHook as TraceHook
from gpu_alloc.cupy.installation import install as install
from gpu_alloc.cupy.installation import uninstall as uninstall
from gpu_alloc.cupy.installation import use as use
from gpu_alloc.cupy.pool import CupyPool as CupyPool
