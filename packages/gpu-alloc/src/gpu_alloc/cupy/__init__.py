"""CuPy's arrays in our pool, and a recorder of CuPy's own. Imports cupy on first use.

May import: core, sources, trace.
"""

from gpu_alloc.cupy.backend import CudaBackend as CudaBackend
from gpu_alloc.cupy.backend import CupyBackend as CupyBackend
from gpu_alloc.cupy.backend import HostBackend as HostBackend
from gpu_alloc.cupy.hooks import TraceHook as TraceHook
from gpu_alloc.cupy.pool import CupyPool as CupyPool
from gpu_alloc.cupy.pool import cuda_version_problem as cuda_version_problem
from gpu_alloc.cupy.pool import install as install
from gpu_alloc.cupy.pool import uninstall as uninstall
from gpu_alloc.cupy.pool import use as use
