"""A `CupyPool` as CuPy's allocator, and back.

Invariant: a process has at most one pool of ours installed, and `uninstall` puts back what was
there.

    pool = use("tuned.toml")
    ...                               # cupy arrays now live in the pool
    uninstall()                       # arrays that are still alive stay valid
"""

import os
import threading
from typing import NamedTuple, final

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.cupy.backend import CupyBackend
from gpu_alloc.cupy.pool import CupyPool
from gpu_alloc.cupy.sharing import Share
from gpu_alloc.errors import AllocError
from gpu_alloc.plan import LifetimePlan
from gpu_alloc.sources import import_cupy


class _Installed(NamedTuple):
    """What `install` set, and what it replaced, so that `uninstall` can put that back."""

    pool: CupyPool
    allocator: object
    previous: object


@final
class _Installation:
    """Whether a pool of this module is CuPy's allocator, of which a process has one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: _Installed | None = None


_INSTALLATION = _Installation()


def install(
    config: AllocatorConfig | None = None,
    *,
    backend: CupyBackend | None = None,
    share: Share = None,
    plan: LifetimePlan | None = None,
) -> CupyPool:
    """Make a `CupyPool` CuPy's allocator for all threads, and return it.

    share, plan: as of `CupyPool`. On CUDA, what CuPy's default pool holds idle is given back to the
    driver first, so that the new pool can have it. Raises AllocError when a pool of this module is
    installed already, and ValueError (from CuPy) inside `cupy.cuda.using_allocator`.
    """
    with _INSTALLATION.lock:
        if _INSTALLATION.now is not None:
            raise AllocError("a gpu_alloc pool is installed already; call uninstall() first")
        cupy = import_cupy()
        pool = CupyPool(config, backend=backend, share=share, plan=plan)
        if backend is None:
            cupy.get_default_memory_pool().free_all_blocks()
            pool.allocator()  # pre-allocates now, so that what does not fit fails here
        now = _Installed(pool, pool.malloc, cupy.cuda.get_allocator())
        try:
            cupy.cuda.set_allocator(now.allocator)
        except ValueError:
            pool.close()
            raise
        _INSTALLATION.now = now  # gate: module-state - CuPy has one allocator a process
        return pool


def use(
    config: AllocatorConfig | str | os.PathLike[str] | None = None,
    *,
    backend: CupyBackend | None = None,
    share: Share = None,
    plan: LifetimePlan | str | os.PathLike[str] | None = None,
) -> CupyPool:
    """`install` with settings, or with the file of settings that `gpu-alloc tune` wrote.

    plan: as of `CupyPool`, or the file that `gpu-alloc plan` wrote. Raises as `install`,
    `AllocatorConfig.from_toml` and `LifetimePlan.load` do.
    """
    if isinstance(config, (str, os.PathLike)):
        config = AllocatorConfig.from_toml(config)
    if isinstance(plan, (str, os.PathLike)):
        plan = LifetimePlan.load(plan)
    return install(config, backend=backend, share=share, plan=plan)


def uninstall() -> None:
    """Put the allocator back that `install` replaced, and close the pool.

    Arrays made meanwhile stay valid; their memory returns to the driver as they die. Raises
    AllocError when nothing is installed, or when someone set another allocator after `install`.
    """
    with _INSTALLATION.lock:
        now = _INSTALLATION.now
        if now is None:
            raise AllocError("no gpu_alloc pool is installed; call install() first")
        cuda = import_cupy().cuda
        if cuda.get_allocator() is not now.allocator:
            raise AllocError(
                "CuPy's allocator was changed after install(); set it back to pool.malloc of the "
                "installed pool before uninstall()"
            )
        cuda.set_allocator(now.previous)
        _INSTALLATION.now = None  # gate: module-state - CuPy has one allocator a process
        now.pool.close()
