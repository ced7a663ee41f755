"""What several commands take: sizes in words, and settings on top of the environment's.

Invariant: a size in words and the settings in a trace of them mean the same in every command.
"""

import argparse
import re
from collections.abc import Callable
from typing import TypeAlias

from gpu_alloc.core import ENV_VARIABLE, AllocatorConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run = Callable[[argparse.Namespace], int]

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes from `1000`, `2MiB` or `1.5 GiB`. Raises argparse.ArgumentTypeError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB or TiB"
        )
    if "." not in match[1]:
        return int(match[1]) * _UNITS[match[2]]
    return int(float(match[1]) * _UNITS[match[2]])


def effective_config(arguments: argparse.Namespace) -> AllocatorConfig:
    """The settings of the environment, and `--conf` on top of them."""
    return AllocatorConfig.parse(arguments.conf, base=AllocatorConfig.from_env())


def add_conf(parser: argparse.ArgumentParser) -> None:
    """Add `--conf` and `--json`."""
    parser.add_argument(
        "--conf",
        default="",
        metavar="KEY:VALUE,...",
        help=f"settings on top of the environment variable {ENV_VARIABLE}",
    )
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the trace that a command reads."""
    parser.add_argument("trace", help="trace of `gpu-alloc record`, or a torch snapshot")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument("--device", type=int, help="of a torch snapshot that has several")
