"""`weight-convert verify A B`: whether two directories hold the same tensors, values or logits."""

import argparse

from weight_convert.cli.arguments import add_family, family_given
from weight_convert.opinions import Opinion
from weight_convert.verification import LEVELS, verify

_SHOWN_DIFFERENCES = 20


def add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser("verify", help="compare the tensors of A and B")
    parser.add_argument("a", metavar="A", help="model directory, in any format")
    parser.add_argument("b", metavar="B", help="model directory, in any format")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="bytes",
        help="headers: names, dtypes and shapes alone; bytes: all of every tensor (default); "
        "values: numbers, and what transformers loads of either; logits: its logits, too",
    )
    add_family(parser)
    parser.set_defaults(run=_run_verify)


def _run_verify(args: argparse.Namespace) -> int:
    report = verify(args.a, args.b, spec=family_given(args), level=args.level)
    for difference in report.differences[:_SHOWN_DIFFERENCES]:
        print(f"{difference.key}: {difference.detail}")
    if len(report.differences) > _SHOWN_DIFFERENCES:
        print(f"... and {len(report.differences) - _SHOWN_DIFFERENCES:,} more")
    verdict = "equal" if report.equal else f"{len(report.differences):,} differ"
    formats = f" ({' against '.join(report.formats)})" if len(set(report.formats)) > 1 else ""
    print(
        f"{verdict}: {report.num_tensors:,} tensors, {report.compared_bytes:,} bytes compared"
        f"{formats}"
    )
    if report.opinion is not None:
        _print_opinion(report.opinion)
    return 0 if report.equal else 1


def _print_opinion(opinion: Opinion) -> None:
    verdict = f"{len(opinion.differences):,} differ" if opinion.differences else "the same values"
    print(f"transformers {opinion.version} loads {opinion.num_tensors:,} tensors: {verdict}")
    if opinion.not_loaded:
        shown = ", ".join(opinion.not_loaded[:3])
        print(f"it does not load {len(opinion.not_loaded):,} stored tensors: {shown}")
    if opinion.max_logit_difference is not None:
        print(
            f"logits differ by at most {opinion.max_logit_difference:.3g}; the greatest is "
            f"{opinion.largest_logit:.3g}"
        )
