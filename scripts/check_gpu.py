"""Prove that this interpreter's torch is a CUDA build that sees a device and computes on it.

    python scripts/check_gpu.py        # prints the versions and the card; non-zero with one message

Needs nothing but Python and torch; run before GPU tests, so that a machine without a GPU, or an
environment that got a CPU build of torch, cannot pass by skipping everything.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Print what was found, or the first thing that is missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 - it reports exactly that the interpreter is older
        return _missing(f"python {sys.version.split()[0]} is too old; 3.11 or newer is needed")
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return _missing("torch is not installed for this python; set PYTHON to one that has it")
    if torch.version.cuda is None:
        return _missing(f"torch {torch.__version__} is not a CUDA build")
    if not torch.cuda.is_available():
        driver = _driver()
        here = "no driver is loaded here" if driver == "unknown" else f"the driver is {driver}"
        return _missing(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no CUDA device, and "
            f"{here}; run this on a GPU machine whose driver is new enough for that CUDA"
        )
    missing = _kernels_missing(torch)
    if missing:
        return _missing(missing)
    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    if (x * 2).sum().item() != 1024 * 1023:
        return _missing("the device computes wrong sums")
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"check_gpu: torch {torch.__version__}, CUDA {torch.version.cuda}, driver {_driver()}")
    print(f"check_gpu: {len(cards)} x {cards[0]}; {_about_cupy(torch)}")
    return 0


def _kernels_missing(torch: Any) -> str:
    """What torch lacks for the cards here: code for their compute capability."""
    built = [name for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    if not built:
        return ""
    oldest = min(int(name.removeprefix("sm_").rstrip("af")) for name in built)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if major * 10 + minor < oldest:
            return (
                f"card {index} has compute capability {major}.{minor}, and torch "
                f"{torch.__version__} has code for {', '.join(built)}; install a torch built for it"
            )
    return ""


def _driver() -> str:
    """The driver's version."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def _about_cupy(torch: Any) -> str:
    """What is known of CuPy: without it, or with one of another CUDA, some tests are not run."""
    try:
        cupy = importlib.import_module("cupy")
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError as error:
        return f"no CuPy ({error}): its tests are not run"
    if str(major) != torch.version.cuda.split(".")[0]:
        return f"CuPy {cupy.__version__} is of CUDA {major}, torch of {torch.version.cuda}"
    return f"CuPy {cupy.__version__} of CUDA {major}"


def _missing(message: str) -> int:
    print(f"check_gpu: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
