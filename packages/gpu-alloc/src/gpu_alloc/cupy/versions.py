"""Whether CuPy and torch of a process are built for one CUDA.

Invariant: one warning for each problem of a process.

>>> cuda_version_problem(12090, "12.4") is None
True
"""

import sys
import warnings
from functools import cache

from gpu_alloc.errors import CudaVersionWarning
from gpu_alloc.sources import import_cupy


def cuda_version_problem(cupy_version: int, torch_version: str | None) -> str | None:
    """Why two CUDA builds do not go together, or None.

    cupy_version: as CUDA counts, 12090 for 12.9. torch_version: `torch.version.cuda`, for example
    "13.0"; None for a torch without CUDA.
    """
    cupy_major = cupy_version // 1000
    torch_major = int(torch_version.split(".")[0]) if torch_version else cupy_major
    if cupy_major == torch_major:
        return None
    return (
        f"cupy is built for CUDA {cupy_major} but torch for CUDA {torch_major}; libraries of both "
        f"majors in one process can fail at run time: pip install 'gpu-alloc[cuda{torch_major}]' "
        "and remove the other cupy"
    )


def warn_of_cuda_versions() -> None:
    """Warn when torch is imported and is built for another CUDA than CuPy."""
    torch = sys.modules.get("torch")
    if torch is not None:
        version = import_cupy().cuda.runtime.runtimeGetVersion()
        problem = cuda_version_problem(version, torch.version.cuda)
        if problem is not None:
            _warn_once(problem)


@cache
def _warn_once(problem: str) -> None:
    warnings.warn(problem, CudaVersionWarning, stacklevel=5)
