"""The sub-command `plan`: which way MoE rows should travel on a machine, as a table or JSON.

comm-collectives plan --nodes 8 --gpus-per-node 8 --experts 256 --topk 8 --hidden 7168
"""

import argparse
import json
import sys
from dataclasses import asdict

from comm_collectives.planning.planner import DispatchPlan, VariantPlan, plan_dispatch
from comm_collectives.planning.topology import PRESETS, topology_preset
from comm_collectives.planning.workload import ITEMSIZES, Payload, Workload

_PAYLOADS: dict[str, tuple[Payload, ...]] = {
    "any": ("full", "float8_e4m3"),
    "full": ("full",),
    "float8_e4m3": ("float8_e4m3",),
}
_TITLES = ["variant", "copies/token", "inter MB", "intra MB", "inter msgs", "intra msgs"]
_TITLES += ["dispatch ms", "combine ms", "backward ms"]
_SIZES = {
    "--nodes": "number of nodes",
    "--gpus-per-node": "ranks of one node",
    "--experts": "experts of all ranks together",
    "--topk": "experts that a token chooses",
    "--hidden": "elements of a token's row",
}


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` to its parser."""
    for name, text in _SIZES.items():
        parser.add_argument(name, type=int, required=True, help=text)
    add = parser.add_argument
    add("--tokens", type=int, default=4096, help="tokens of a rank (default: 4096)")
    add("--dtype", choices=ITEMSIZES, default="bfloat16", help="of the rows (default: bfloat16)")
    add("--topology", choices=PRESETS, default=PRESETS[0], help=f"default: {PRESETS[0]}")
    nodes = "nodes that the choices of one token may lie in (default: 0, no limit)"
    add("--nodes-per-token", type=int, default=0, help=nodes)
    payload = "allowed payloads; float8_e4m3 rounds the dispatched rows (default: any)"
    add("--payload", choices=_PAYLOADS, default="any", help=payload)
    add("--json", action="store_true", help="print the whole plan as JSON instead")


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan and return the exit status: 0, or 2 if the numbers do not fit together."""
    try:
        workload = Workload(
            num_experts=args.experts,
            topk=args.topk,
            hidden_size=args.hidden,
            tokens_per_rank=args.tokens,
            dtype=args.dtype,
            nodes_per_token=args.nodes_per_token,
        )
        topology = topology_preset(
            args.topology, nodes=args.nodes, gpus_per_node=args.gpus_per_node
        )
        plan = plan_dispatch(workload, topology, payloads=_PAYLOADS[args.payload])
    except (ValueError, OverflowError) as error:
        print(f"comm-collectives plan: {error}", file=sys.stderr)
        return 2
    print(plan_to_json(plan) if args.json else format_plan(plan))
    return 0


def format_plan(plan: DispatchPlan) -> str:
    """Return the plan as a table for people; the chosen variant is marked by a star."""
    workload, topology = plan.workload, plan.topology
    rows = [_TITLES, *(_cells(variant, plan.choice) for variant in plan.variants)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{topology.name}, nodes: {topology.nodes}, ranks per node: {topology.gpus_per_node}, "
        f"experts: {workload.num_experts}, top {workload.topk}, tokens per rank: "
        f"{workload.tokens_per_rank} of {workload.hidden_size} {workload.dtype}",
        "Uniform routing. Bytes and messages: one rank, dispatch. Times: links alone.",
        "",
        *(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ),
        "",
        f"chosen: {plan.choice}: {plan.reason}",
    ]
    exact = [variant for variant in plan.variants if variant.payload == "full"]
    if plan.choice.payload != "full" and exact:
        best = min(exact, key=lambda variant: variant.forward_s)
        lines.append(f"without rounding: {best}, {best.forward_s * 1e3:.3g} ms")
    return "\n".join(lines)


def plan_to_json(plan: DispatchPlan) -> str:
    """Return the plan as JSON: every variant with every exchange, times in seconds."""
    return json.dumps(
        {
            "topology": {
                key: getattr(plan.topology, key) for key in ("name", "nodes", "gpus_per_node")
            },
            "workload": asdict(plan.workload),
            "choice": {"route": plan.choice.route, "payload": plan.choice.payload},
            "reason": plan.reason,
            "variants": [
                asdict(variant) | {"forward_s": variant.forward_s, "backward_s": variant.backward_s}
                for variant in plan.variants
            ],
        }
    )


def _cells(variant: VariantPlan, choice: VariantPlan) -> tuple[str, ...]:
    dispatch = variant.movement("dispatch")
    return (
        f"{variant} *" if variant == choice else str(variant),
        f"{variant.copies_per_token:.2f}",
        *(f"{dispatch.total(f'{level}_bytes') / 1e6:.2f}" for level in ("inter", "intra")),
        *(str(dispatch.total(f"{level}_messages")) for level in ("inter", "intra")),
        f"{dispatch.seconds * 1e3:.3f}",
        f"{variant.movement('combine').seconds * 1e3:.3f}",
        f"{variant.backward_s * 1e3:.3f}",
    )
