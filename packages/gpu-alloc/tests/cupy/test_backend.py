"""The device side of the adapter; without a driver only its errors can be seen."""

import subprocess
import sys

import pytest

cupy = pytest.importorskip("cupy", reason="the CuPy adapter needs the extra cuda12 or cuda13")

from gpu_alloc.cupy import CudaBackend  # noqa: E402
from gpu_alloc.sources import CudaSource  # noqa: E402


def test_missing_cupy_is_one_clear_error() -> None:
    code = (
        "import sys\nsys.modules['cupy'] = None\nfrom gpu_alloc.cupy_memory import install\n"
        "try:\n    install()\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "gpu-alloc[cuda13]" in done.stdout


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_source_takes_releases_and_reports_no_room() -> None:
    source = CudaSource(0)
    ptr = source.acquire(2 << 20)
    assert ptr is not None
    assert ptr % source.alignment_bytes == 0
    cupy.cuda.runtime.memset(ptr, 1, 2 << 20)
    source.release(ptr, 2 << 20)
    assert source.acquire(1 << 50) is None
    cupy.cuda.runtime.deviceSynchronize()  # the failure must not stick to the context


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_backend_follows_the_current_stream_and_device() -> None:
    backend = CudaBackend()
    assert backend.device_id() == cupy.cuda.Device().id
    assert backend.total_bytes() == cupy.cuda.runtime.memGetInfo()[1]
    assert backend.stream() == cupy.cuda.get_current_stream().ptr
    with cupy.cuda.Stream() as stream:
        assert backend.stream() == stream.ptr
    with cupy.cuda.Stream.ptds:
        assert backend.stream() < 0
        assert backend.stream() == backend.stream()
