"""`weight-convert lora SRC ADAPTER DST`: an adapter of peft merged into a model.

weight-convert lora Qwen3-30B-A3B my-lora merged
"""

import argparse
import time

from weight_convert.adapters import lora
from weight_convert.cli.reporting import (
    add_output,
    output_options,
    print_written,
    progress_line,
)


def add_lora(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "lora", help="merge LoRA, rsLoRA or DoRA into SRC, dense layers and fused experts"
    )
    parser.add_argument("src", metavar="SRC", help="model directory")
    parser.add_argument("adapter", metavar="ADAPTER", help="directory that peft wrote")
    parser.add_argument("dst", metavar="DST", help="directory to create; must not exist")
    add_output(parser)
    parser.set_defaults(run=_run_lora)


def _run_lora(args: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    report = lora(
        args.src,
        args.adapter,
        args.dst,
        options=output_options(args),
        on_progress=progress_line(),
    )
    print_written(report, started_s)
    return 0
