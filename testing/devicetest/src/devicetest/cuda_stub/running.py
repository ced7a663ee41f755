"""Compile the stub once for a machine, and run Python programs on it.

Built from the three C files beside this module with CUDA's headers that torch's wheels bring, into
a folder of the system's temporary files under a name made of their hash. No wheel carries it.

Invariant: a program that runs on the stub has it in place of every CUDA library that torch loads.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_SOURCES = Path(__file__).parent
_LIBRARIES = {
    "runtime.c": "libcudart_stub.so",
    "driver.c": "libcuda.so.1",
    "nvml.c": "libnvidia-ml.so.1",
}


class StubUnavailableError(RuntimeError):
    """The stub cannot be built here; the message says what is missing."""


def run_on_stub(
    *arguments: str,
    gpu_bytes: int = 80 << 30,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` on a GPU of so many bytes that is not there.

    Raises StubUnavailableError as `stub_environment` does, TimeoutExpired after `timeout_s`.
    """
    environment = {**os.environ, **stub_environment(gpu_bytes), **(env or {})}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def stub_environment(gpu_bytes: int) -> dict[str, str]:
    """The variables under which a program finds the stub. Raises StubUnavailableError without a C
    compiler, or without the headers of CUDA 13 that torch's wheels for it bring.
    """
    folder = _built()
    return {
        "LD_PRELOAD": str(folder / _LIBRARIES["runtime.c"]),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "STUB_GPU_BYTES": str(gpu_bytes),
    }


def _built() -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise StubUnavailableError("no C compiler: install gcc, or set CC")
    headers = _headers()
    sources = sorted(f for f in _SOURCES.rglob("*") if f.suffix in (".c", ".h"))
    made_of = hashlib.sha256(b"".join(f.read_bytes() for f in sources))
    made_of.update(str(headers).encode())
    folder = Path(tempfile.gettempdir()) / f"cuda-stub-{os.getuid()}-{made_of.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix="cuda-stub-building-") as building:
        for source, library in _LIBRARIES.items():
            _compile(compiler, headers, source, Path(building) / library)
        try:
            shutil.copytree(building, f"{folder}-{os.getpid()}")
            os.rename(f"{folder}-{os.getpid()}", folder)
        except OSError:
            if not folder.is_dir():  # another process was first
                raise
    return folder


def _compile(compiler: str, headers: Path, source: str, target: Path) -> None:
    include: Sequence[str] = (f"-I{_SOURCES / 'include'}", f"-I{headers}")
    name = () if source == "runtime.c" else (f"-Wl,-soname,{target.name}",)
    flags = ("-O1", "-w", "-shared", "-fPIC", "-pthread", *include, *name)
    command = [compiler, *flags, "-o", str(target), str(_SOURCES / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StubUnavailableError(f"{' '.join(command)} failed: {done.stderr[-500:]}")


def _headers() -> Path:
    """The folder of `driver_types.h` for CUDA 13."""
    try:
        found = files("nvidia-cuda-runtime") or []
    except PackageNotFoundError:
        found = []
    for file in found:
        if file.name == "driver_types.h":
            return Path(str(file.locate())).resolve().parent
    raise StubUnavailableError("no headers of CUDA 13: install a torch that is built for it")
