"""Arguments that several commands share: the family of a directory, and sizes.

add_family(parser); spec = family_given(parser.parse_args())
"""

import argparse
import re

from weight_convert.cutting import SplitLayout
from weight_convert.errors import WeightConvertError
from weight_convert.specs import FamilySpec, family_names, get_spec, read_spec

_DEGREES = {
    "tp": "ranks that share attention, dense layers and the vocabulary",
    "ep": "ranks that share the experts",
    "etp": "ranks that share each expert",
    "pp": "stages that share the layers",
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add `--model-type` and `--spec`."""
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help=f"family where config.json names none: {', '.join(family_names())}",
    )
    parser.add_argument("--spec", metavar="FILE.toml", help="family described by a file of yours")


def family_given(args: argparse.Namespace) -> FamilySpec | None:
    """The family that the user gave, if any."""
    if args.spec is not None and args.model_type is not None:
        raise WeightConvertError("--spec and --model-type both name a family; give one of them")
    if args.spec is not None:
        return read_spec(args.spec)
    return None if args.model_type is None else get_spec(args.model_type)


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the degrees of a layout."""
    for name, what in _DEGREES.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=what)
    parser.add_argument(
        "--vocab-multiple",
        type=int,
        default=0,
        metavar="N",
        help="pad the vocabulary with zero rows to a multiple of N times tp (default: do not)",
    )


def layout_given(args: argparse.Namespace) -> SplitLayout:
    """The layout that `add_layout` added."""
    return SplitLayout(
        tp=args.tp, ep=args.ep, etp=args.etp, pp=args.pp, vocab_multiple=args.vocab_multiple
    )


def parse_size(text: str) -> int:
    """Return the bytes of `5GB` (decimal, as transformers reads it), `5GiB` or a plain number.

    Raises:
        argparse.ArgumentTypeError: anything else, less than one byte, or too many.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected for example 5GB or 500MiB")
    size_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size_bytes < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte, or 2 ** 63 and more")
    return int(size_bytes)
