"""`mesh-spmd groups`: the ranks of every group along some axes."""

from __future__ import annotations

import argparse
import json

from mesh_spmd.commands.options import Command, add_mesh, parse_mesh, show_table


def _group_options(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--axes", required=True, help="the axes that vary, as in dp,ep")


def run_groups(arguments: argparse.Namespace) -> str:
    """Return the table of groups, or a line of JSON for each."""
    mesh = parse_mesh(arguments.mesh)
    axes = tuple(name.strip() for name in arguments.axes.split(",") if name.strip())
    groups = mesh.groups(*axes)
    fixed = [axis for axis in mesh.axis_names if axis not in axes]
    found = [({axis: mesh.coordinate(group[0])[axis] for axis in fixed}, group) for group in groups]
    if arguments.json:
        return "\n".join(json.dumps({"fixed": at, "ranks": ranks}) for at, ranks in found)
    rows = [[*map(str, at.values()), " ".join(map(str, ranks))] for at, ranks in found]
    summary = f"{len(groups)} group(s) of {len(groups[0])} rank(s) along {', '.join(axes)}"
    return show_table([*fixed, "ranks"], rows) + "\n\n" + summary


GROUPS = Command(
    name="groups",
    text="print the ranks of every group along some axes",
    add=_group_options,
    run=run_groups,
)
