"""Prove that this interpreter's torch is a CUDA build that sees a device and computes on it.

    python scripts/check_gpu.py        # prints the versions and the card; non-zero with one message

Needs nothing but Python and torch; run before GPU tests, so that a machine without a GPU, or an
environment that got a CPU build of torch, cannot pass by skipping everything.
"""

import importlib
import sys


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
        return _missing(f"torch {torch.__version__} sees no CUDA device; run this on a GPU machine")
    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    if (x * 2).sum().item() != 1024 * 1023:
        return _missing("the device computes wrong sums")
    card = torch.cuda.get_device_name(0)
    print(f"check_gpu: torch {torch.__version__}, CUDA {torch.version.cuda}, {card}")
    return 0


def _missing(message: str) -> int:
    print(f"check_gpu: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
