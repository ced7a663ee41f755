"""The command `moe-train verify-layouts`."""

import argparse

from moe_train.commands.options import Command, add_config
from moe_train.config import load_config
from moe_train.errors import TrainValueError
from moe_train.rank import ForkServer


def _add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--ranks", type=int, default=4, help="processes of the largest layout (4)")
    parser.add_argument("--layouts", type=int, default=20, help="layouts at most (20)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each layout (20)")
    parser.add_argument(
        "--limit",
        type=float,
        default=1e-6,
        help="relative difference of losses and gradient norms that is still the same (1e-6)",
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="instead: keys that change the numbers, such as bfloat16, capacity or fp8 payloads, "
        "each in unlike layouts against one rank under the same key",
    )


def _verify(arguments: argparse.Namespace) -> int:
    """Run a job's first steps under many layouts and compare losses and gradient norms."""
    for name in ("ranks", "layouts", "steps"):
        if getattr(arguments, name) < 1:
            raise TrainValueError(f"--{name} {getattr(arguments, name)}: expected 1 or more")
    config = load_config(arguments.config, arguments.overrides)
    ForkServer.begin("moe_train.jobs.layout_rank")
    from moe_train.jobs import verify_keys, verify_layouts

    if arguments.keys:
        reports = verify_keys(
            config, max_ranks=arguments.ranks, steps=arguments.steps, limit=arguments.limit
        )
        print("\n".join(report.text for report in reports))
        return 0 if all(report.holds for report in reports) else 1
    report = verify_layouts(
        config,
        max_ranks=arguments.ranks,
        count=arguments.layouts,
        steps=arguments.steps,
        limit=arguments.limit,
    )
    print(report.text)
    return 0 if report.holds else 1


VERIFY_LAYOUTS = Command(
    name="verify-layouts",
    text="compare losses of a job under many layouts",
    add=_add,
    run=_verify,
)
