"""The name under which `gpu_alloc.cupy` was first published; new code imports that."""

from gpu_alloc.cupy import CupyBackend as CupyBackend
from gpu_alloc.cupy import CupyPool as CupyPool
from gpu_alloc.cupy import install as install
from gpu_alloc.cupy import uninstall as uninstall
