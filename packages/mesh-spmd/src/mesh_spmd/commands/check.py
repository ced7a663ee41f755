"""`mesh-spmd check`: a change of layout on ranks of this machine, each part compared."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from mesh_spmd.commands.layouts import SYNTAX
from mesh_spmd.commands.options import Answer, Command, add_shape, show_table
from mesh_spmd.commands.tensors import add_dtype, add_layouts, pair_of_line
from mesh_spmd.errors import MeshValueError

if TYPE_CHECKING:
    from mesh_spmd.trials import Case, Outcome, Report

_MOST_LINES = 20
_EPILOG = f"""{SYNTAX}
checks, each on every rank:
  groups      an all-reduce along each axis meets the ranks that the mesh says
  creation    a rank's part of a new tensor is what one process makes there
  reshard     numbered elements, bit for bit, to the target and back
  bytes       what ranks hand over for others is what mesh-spmd plan says
  gradients   known gradients go back to the source
  random      random numbers made in the source become those made in the target
  shapes      from the shapes that ranks hold, the layout is found again
  parts       rows split along each axis to sub-meshes, and joined again
  dtensor     torch's own DTensor.redistribute gives the same

exit status: 0 all is right, 1 something differs or a rank was lost, 2 bad input
"""


def _check_options(parser: argparse.ArgumentParser) -> None:
    add_layouts(parser)
    parser.epilog = _EPILOG
    add_shape(parser)
    add_dtype(parser)
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu (default, gloo), or cuda: ranks take the devices in turn, with NCCL where there "
        "is one for each",
    )
    parser.add_argument(
        "--timeout-s",
        default="60",
        help="the longest that a rank may take to start, or for one check, in seconds (60)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_check(arguments: argparse.Namespace) -> Answer:
    """Return the table of checks, or a line of JSON for each, and 1 if something is not right."""
    from mesh_spmd.trials import Case, check_on_ranks

    timeout_s = _seconds(arguments.timeout_s)
    source, target = pair_of_line(arguments)
    case = Case(source=source, target=target, device_type=arguments.device)
    report = check_on_ranks(case, timeout_s=timeout_s)
    text = _as_json(report) if arguments.json else _as_table(case, report)
    return Answer(text, 0 if report.right else 1)


def _as_table(case: Case, report: Report) -> str:
    rows = [
        [outcome.name, str(outcome.num_ranks), _verdict(case, outcome)]
        for outcome in report.outcomes
    ]
    lines = [*report.lost, *(line for outcome in report.outcomes for line in outcome.problems)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]
    blocks = [show_table(["check", "ranks", "verdict"], rows), "\n".join(lines), _planned(case)]
    return "\n\n".join(filter(None, blocks))


def _verdict(case: Case, outcome: Outcome) -> str:
    if outcome.left_out:
        return f"left out: {outcome.left_out}"
    if outcome.problems:
        return "DIFFERS"
    return "right" if outcome.num_ranks == case.world_size else "did not end"


def _planned(case: Case) -> str:
    from mesh_spmd.reshard import plan_reshard

    plan = plan_reshard(case.source, case.target)
    received, sent = plan.busiest_bytes
    return (
        f"{case.world_size} rank(s) on {case.device_type}; busiest rank: {received:,} bytes "
        f"received, {sent:,} sent; {sum(plan.received_bytes.values()):,} bytes in all"
    )


def _as_json(report: Report) -> str:
    rows: list[dict[str, object]] = [
        {
            "check": outcome.name,
            "ranks": outcome.num_ranks,
            "left_out": outcome.left_out,
            "problems": outcome.problems,
        }
        for outcome in report.outcomes
    ]
    return "\n".join(map(json.dumps, [*rows, {"right": report.right, "lost": report.lost}]))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise MeshValueError(
            f"--timeout-s got {text!r}; give seconds above zero, at most 86400, as in 60"
        )
    return seconds


CHECK = Command(
    name="check",
    text="carry a change of layout out on ranks of this machine, and compare every part",
    add=_check_options,
    run=run_check,
)
