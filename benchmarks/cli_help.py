"""How long `<command> --help` takes, against `import torch`, in alternating runs of new processes.

A command that imports torch to print its help makes every mistyped option cost seconds. Both sides
start the same interpreter; the floor is an empty Python process, printed beside the ratio.

    python benchmarks/cli_help.py                # all seven commands
    python benchmarks/cli_help.py mesh-spmd      # one of them
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

COMMANDS = (
    "mesh-spmd",
    "gpu-alloc",
    "comm-collectives",
    "moe-pipeline",
    "unified-ckpt",
    "weight-convert",
    "moe-train",
)


def seconds(code: str) -> float:
    """Wall time of a new interpreter running the code; it must end with status 0."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def help_code(command: str) -> str:
    """What the installed console script does for `<command> --help`."""
    module = command.replace("-", "_")
    return f"import sys; sys.argv[1:] = ['--help']; from {module}.cli import main; sys.exit(main())"


def measure(command: str, runs: int) -> dict[str, object]:
    """The median ratio of help to torch over alternating runs, after one warm-up of each side."""
    codes = {"help": help_code(command), "torch": "import torch", "floor": "pass"}
    for code in codes.values():
        seconds(code)
    taken: dict[str, list[float]] = {side: [] for side in codes}
    for _ in range(runs):
        for side, code in codes.items():
            taken[side].append(seconds(code))
    ratios = sorted(h / t for h, t in zip(taken["help"], taken["torch"], strict=True))
    floor = statistics.median(taken["floor"]) / statistics.median(taken["torch"])
    return {
        "figure": f"cli_help_{command.replace('-', '_')}",
        "value": round(statistics.median(ratios), 4),
        "unit": "x",
        "low": round(ratios[0], 4),
        "high": round(ratios[-1], 4),
        "n": runs,
        "floor": round(floor, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line for each command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commands", nargs="*", metavar="command", help="; ".join(COMMANDS))
    parser.add_argument("--runs", type=int, default=7, help="measured runs of each side")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.commands) - set(COMMANDS)
    if unknown:
        parser.error(f"unknown commands {', '.join(sorted(unknown))}; choose of {COMMANDS}")
    for command in arguments.commands or COMMANDS:
        print(json.dumps(measure(command, arguments.runs)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
