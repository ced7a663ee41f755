"""Where the compiled core is: in the wheel, or made from core.cpp at first use.

The library knows nothing of Python, so one file serves every version of it. A wheel carries it
beside this module. A bare checkout compiles it with the system's compiler into a cache folder,
under a name made of the source's hash: a changed source is compiled again, and of processes that
compile at a time each writes a file of its own and renames it.

Invariant: what `library_path` returns was compiled from the core.cpp beside this file, or came in
the wheel with it.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import final

from gpu_alloc.errors import AllocError

SOURCE = Path(__file__).with_name("core.cpp")
# Not `.so`, which Python would take for a module of its own.
LIBRARY_NAME = "libgpu_alloc_core.so.1"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
# A wheel's library meets other systems' C++ libraries, so it brings its own; but not its own way of
# throwing (libgcc), since torch's catches what it throws.
_FLAGS_OF_WHEELS = ("-static-libstdc++",)
_COMPILERS = ("c++", "g++", "clang++")


@final
class NativeUnavailableError(AllocError, RuntimeError):
    """There is no compiled core here and none can be made; the Python core does without."""


def library_path() -> Path:
    """The compiled core, made now if need be. Raises NativeUnavailableError saying what to do."""
    shipped = SOURCE.with_name(LIBRARY_NAME)
    if shipped.is_file():
        return shipped
    text = SOURCE.read_bytes()
    made_of = hashlib.sha256(text + repr((_FLAGS, platform.machine())).encode()).hexdigest()[:16]
    cached = _cache_folder() / f"core-{made_of}.so"
    if not cached.is_file():
        build_library(cached)
    return cached


def build_library(target: Path, *, for_wheel: bool = False) -> None:
    """Compile core.cpp to `target`. Raises NativeUnavailableError without a working compiler."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise NativeUnavailableError(
            f"no C++ compiler ({', '.join(_COMPILERS)}, or the one that CXX names): install one, "
            "or install gpu-alloc from a wheel for this system"
        )
    flags = (*_FLAGS, *(_FLAGS_OF_WHEELS if for_wheel else ()))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
            made = Path(folder) / LIBRARY_NAME
            command = [compiler, *flags, "-o", str(made), str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NativeUnavailableError(
                    f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}"
                )
            os.replace(made, target)
    except OSError as error:
        raise NativeUnavailableError(
            f"the compiled core cannot be made in {target.parent}: {error}; set XDG_CACHE_HOME to "
            "a folder that can be written, or CXX to a compiler that runs"
        ) from None


def _cache_folder() -> Path:
    if sys.platform != "linux":
        raise NativeUnavailableError(f"the compiled core is for Linux, and this is {sys.platform}")
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "gpu_alloc"
