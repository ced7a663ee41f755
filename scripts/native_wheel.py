"""Put the compiled core into a wheel of gpu-alloc, which is for this system from then on.

    uv build --wheel --package gpu-alloc -o dist
    python scripts/native_wheel.py dist

The library knows no version of Python, so the wheel is `py3-none-<platform>`: manylinux of the
glibc that it was built against, as auditwheel would name it. The wheel without it is replaced.
"""

import base64
import hashlib
import platform
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages/gpu-alloc/src"))

from gpu_alloc.native.build import LIBRARY_NAME, build_library  # noqa: E402 - the path is set above

LIBRARY = f"gpu_alloc/native/{LIBRARY_NAME}"


def platform_tag() -> str:
    """manylinux_2_36_x86_64 where glibc is 2.36, else what the system calls itself."""
    library, version = platform.libc_ver()
    if library != "glibc":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"manylinux_{version.replace('.', '_')}_{platform.machine()}"


def carry(wheel: Path) -> Path:
    """Write the wheel that carries the library beside `wheel`, remove that, return the new one."""
    tag = f"py3-none-{platform_tag()}"
    target = wheel.with_name(wheel.name.replace("py3-none-any", tag))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "core.so"
        build_library(library, for_wheel=True)
        compiled = library.read_bytes()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        rows = []
        for entry in old.infolist():
            if entry.filename.endswith(".dist-info/RECORD"):
                record = entry
                continue
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/WHEEL"):
                text = content.decode().replace("Tag: py3-none-any", f"Tag: {tag}")
                content = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
            new.writestr(entry, content)
            rows.append(_row(entry.filename, content))
        new.writestr(LIBRARY, compiled)
        rows.append(_row(LIBRARY, compiled))
        new.writestr(record, "".join([*rows, f"{record.filename},,\n"]))
    wheel.unlink()
    return target


def _row(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def main() -> int:
    """Carry the library into each wheel of gpu-alloc in the folder that is named."""
    wheels = sorted(Path(sys.argv[1]).glob("gpu_alloc-*-py3-none-any.whl"))
    if not wheels:
        print(f"no wheel gpu_alloc-*-py3-none-any.whl in {sys.argv[1]}", file=sys.stderr)
        return 2
    for wheel in wheels:
        print(carry(wheel).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
