"""`weight-convert upcycle SRC DST --experts 8 --top-k 2`: a dense model made an MoE one.

weight-convert upcycle Qwen3-8B Qwen3-8B-MoE --experts 32 --top-k 8 --shards 4
"""

import argparse
import time

from weight_convert.cli.reporting import add_output, output_options, print_written, progress_line
from weight_convert.upcycling import Upcycling, upcycle


def add_upcycle(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "upcycle", help="make experts of the MLPs of a dense model (needs torch)"
    )
    parser.add_argument("src", metavar="SRC", help="dense model: Qwen3, Llama or Mistral")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    parser.add_argument("--experts", type=int, required=True, metavar="N", help="of each layer")
    parser.add_argument(
        "--top-k", type=int, required=True, metavar="K", help="experts chosen for each token"
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        metavar="G",
        help="parts that an MLP is cut into, an expert each (default: 1, copies of it)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the routers")
    add_output(parser)
    parser.set_defaults(run=_run_upcycle)


def _run_upcycle(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    upcycling = Upcycling(
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        num_shards=args.shards,
        seed=args.seed,
    )
    report = upcycle(
        args.src,
        args.dst,
        upcycling,
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0
