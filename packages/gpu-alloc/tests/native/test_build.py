import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_alloc import AllocError
from gpu_alloc.native import NativeUnavailableError, build_library
from gpu_alloc.native.build import LIBRARY_NAME, SOURCE, library_path

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
comes_compiled = SOURCE.with_name(LIBRARY_NAME).is_file()
USE = "from gpu_alloc.native import native_library; print(native_library().path)"


@needs_compiler
def test_the_core_is_compiled_once_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comes_compiled:
        pytest.skip("the wheel brings the core compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = library_path()
    assert made.parent == tmp_path / "gpu_alloc"
    assert [f.name for f in made.parent.iterdir()] == [made.name]
    monkeypatch.setenv("CXX", "no-compiler-by-this-name")
    assert library_path() == made, "compiled again"
    used = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=True)
    assert used.stdout.strip() == str(made)


CATCHES = r"""
#include <cstddef>
#include <new>

extern "C" int catches(void* (*malloc)(std::ptrdiff_t, int, void*)) {
  try {
    malloc(8, 0, nullptr);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
"""
CALLS = (
    "import ctypes, sys\n"
    "catcher, core = map(ctypes.CDLL, sys.argv[1:])\n"
    "print(catcher.catches(core.ga_replace_malloc))\n"
)


@needs_compiler
def test_what_a_wheels_core_throws_is_caught_where_nothing_was_thrown_before(
    tmp_path: Path,
) -> None:
    """By a library such as torch's, with a C++ library of its own; nothing serves device 0."""
    core = SOURCE.with_name(LIBRARY_NAME)
    if not comes_compiled:
        core = tmp_path / LIBRARY_NAME
        build_library(core, for_wheel=True)
    source, catcher = tmp_path / "catches.cpp", tmp_path / "catches.so"
    source.write_text(CATCHES)
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", catcher, source], check=True)
    command = [sys.executable, "-c", CALLS, str(catcher), str(core)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_compiler_that_fails_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeUnavailableError, match=r"false .*core\.cpp failed") as caught:
        build_library(tmp_path / "core.so")
    assert isinstance(caught.value, AllocError)
    monkeypatch.setenv("CXX", "no-compiler-by-this-name")
    with pytest.raises(NativeUnavailableError, match="CXX to a compiler that runs"):
        build_library(tmp_path / "core.so")
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_all_else_works(tmp_path: Path) -> None:
    """A process that finds none: the Python core serves, the compiled one is one clear error."""
    if comes_compiled:
        pytest.skip("the wheel brings the core compiled")
    program = (
        "import gpu_alloc\n"
        "from gpu_alloc.native import NativeUnavailableError, NativeAllocator\n"
        "source = gpu_alloc.AddressSource()\n"
        "print(gpu_alloc.TwoPoolAllocator(source).malloc(8).size)\n"
        "try: NativeAllocator(source)\n"
        "except NativeUnavailableError as error: print(error)\n"
    )
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    size, error = done.stdout.splitlines()
    assert size == "512"
    assert error.startswith("no C++ compiler (c++, g++, clang++")
