"""`weight-convert lora SRC ADAPTER DST`: an adapter of peft merged into a model, or extracted.

weight-convert lora Qwen3-30B-A3B my-lora merged
weight-convert lora Qwen3-30B-A3B my-finetuned my-lora --extract 16
"""

import argparse
import time

from weight_convert.adapters import extract_lora, lora
from weight_convert.cli.reporting import (
    add_output,
    output_options,
    print_written,
    progress_line,
)


def add_lora(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "lora",
        help="merge LoRA, rsLoRA or DoRA into SRC, dense layers and fused experts; or extract one",
    )
    parser.add_argument("src", metavar="SRC", help="model directory")
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="directory that peft wrote; the tuned model with --extract",
    )
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    parser.add_argument(
        "--extract",
        type=int,
        metavar="RANK",
        help="write to DST the adapter of this rank that leads from SRC to the model ADAPTER",
    )
    add_output(parser)
    parser.set_defaults(run=_run_lora)


def _run_lora(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    options, on_progress = output_options(args), progress_line()
    paths = (args.src, args.adapter, args.dst)
    if args.extract is None:
        report = lora(*paths, options=options, on_progress=on_progress)
    else:
        report = extract_lora(*paths, rank=args.extract, options=options, on_progress=on_progress)
    print_written(report, started_s)
    return 0
